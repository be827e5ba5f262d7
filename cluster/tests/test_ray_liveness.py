"""Which nodes that Ray takes for alive respond."""

from __future__ import annotations

import socket

from core_rl_cluster.ray_liveness import silent_nodes


def node(address: str, port: int, alive: bool = True) -> dict[str, object]:
    return {"NodeManagerAddress": address, "NodeManagerPort": port, "Alive": alive}


def test_a_node_that_takes_no_connection_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as raylet, socket.socket() as bound:
        bound.bind(("127.0.0.2", 0))
        there, gone = raylet.getsockname()[1], bound.getsockname()[1]
        assert silent_nodes([node("127.0.0.1", there)]) == []
        assert silent_nodes([node("127.0.0.1", there), node("127.0.0.2", gone)]) == ["127.0.0.2"]
        assert silent_nodes([node("127.0.0.2", gone, alive=False)]) == []
    assert silent_nodes([]) == []
