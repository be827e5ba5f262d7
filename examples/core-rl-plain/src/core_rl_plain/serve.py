"""HTTP server of a Hugging Face model: one token at a time, without a cache. It runs without core-rl."""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import pickle
import runpy
from collections.abc import Callable
from typing import Any

import torch
from aiohttp import web
from torch import Tensor
from transformers import AutoModelForCausalLM

Body = dict[str, Any]


class ModelServer:
    """A model, its version, and the requests in flight."""

    def __init__(self, path: str, dtype: str, device: str, seed: int) -> None:
        self.dtype, self.device = getattr(torch, dtype), device
        self.version, self.paused = "default", False
        self.in_flight: set[str] = set()
        self.aborted: set[str] = set()
        self.generator = torch.Generator().manual_seed(seed)
        self.load({"path": path})

    def load(self, body: Body) -> None:
        """Replace the model; after an error the old one stays."""
        model: Any = AutoModelForCausalLM.from_pretrained(body["path"], dtype=self.dtype)
        self.path, self.model = body["path"], model.to(self.device).eval()

    def load_tensors(self, body: Body) -> None:
        """Copy a bucket into the model; names are of a checkpoint."""
        bucket = pickle.loads(base64.b64decode(body["bucket"]))  # noqa: S301  (from the client with the key)
        unknown = self.model.load_state_dict(dict(bucket), strict=False).unexpected_keys
        if unknown:
            raise ValueError(f"the model has no {unknown[0]}")

    def set_version(self, body: Body) -> None:
        """Tokens from now on carry it."""
        self.version = body["version"]

    def pause(self, body: Body) -> None:
        """Requests in flight wait, or end as they are."""
        self.paused = True
        if body["abort"]:
            self.aborted |= self.in_flight

    def resume(self, _body: Body) -> None:
        """Requests compute again."""
        self.paused = False

    def abort(self, body: Body) -> None:
        """One request ends as it is; there may be none of this name."""
        self.aborted |= self.in_flight & {body["id"]}

    def describe(self, _body: Body) -> Body:
        """Path and version of the weights."""
        return {"path": self.path, "version": self.version, "device": self.device}

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """Of all positions, float32 on the CPU."""
        logits: Tensor = self.model(torch.tensor([ids], device=self.device)).logits
        return logits[0].float().cpu()

    async def draw(self, body: Body) -> Body:
        """Draw tokens until one of them stops, or the limit."""
        ids, seed, rid = list(body["ids"]), body["seed"], body["id"]
        drawn: Body = {"ids": [], "logprobs": [], "versions": [], "reason": "length"}
        generator = self.generator if seed is None else torch.Generator().manual_seed(seed)
        self.in_flight.add(rid)
        try:
            for _ in range(body["max_tokens"]):
                await asyncio.sleep(0)  # other requests, and pauses
                while self.paused and rid not in self.aborted:
                    await asyncio.sleep(0.005)
                if rid in self.aborted:
                    drawn["reason"] = "abort"
                    break
                logprobs = torch.log_softmax(self.logits(ids)[-1] / (body["temperature"] or 1.0), -1)
                token = draw_token(logprobs, body, generator)
                ids.append(token)
                drawn["ids"].append(token)
                drawn["logprobs"].append(float(logprobs[token]))
                drawn["versions"].append(self.version)
                if token in body["stop"]:
                    drawn["reason"] = "stop"
                    break
            return drawn
        finally:
            self.in_flight.discard(rid)
            self.aborted.discard(rid)

    async def score(self, body: Body) -> Body:
        """Log-probs of the tokens after the first, and the best ones as pairs of token and log-prob."""
        ids, k = body["tokens"], body["best"]
        logprobs = torch.log_softmax(self.logits(ids)[:-1], -1)
        best = logprobs.topk(k)
        return {
            "logprobs": logprobs.gather(1, torch.tensor(ids[1:])[:, None]).flatten().tolist(),
            "best": [
                list(zip(tokens, values, strict=True))
                for tokens, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ],
        }


def draw_token(logprobs: Tensor, body: Body, generator: torch.Generator) -> int:
    """A token of the distribution after top-k and top-p."""
    if body["temperature"] == 0:
        return int(logprobs.argmax())
    probs, order = logprobs.exp().sort(descending=True)
    probs[body["top_k"] or len(probs) :] = 0
    probs /= probs.sum()
    probs[probs.cumsum(0) - probs >= body["top_p"]] = 0
    return int(order[torch.multinomial(probs, 1, generator=generator)])


def application(server: ModelServer, key: str) -> web.Application:
    """The routes of ``server``, for clients with ``key``."""
    calls: dict[str, Callable[[Body], Any]] = {
        "/generate": server.draw,
        "/score": server.score,
        "/pause": server.pause,
        "/resume": server.resume,
        "/abort": server.abort,
        "/load": server.load,
        "/tensors": server.load_tensors,
        "/version": server.set_version,
        "/model": server.describe,
        "/health": lambda _body: None,
    }

    async def answer(request: web.Request) -> web.Response:
        if key and request.headers.get("Authorization") != f"Bearer {key}":
            raise web.HTTPUnauthorized
        if request.path not in calls:
            raise web.HTTPNotFound
        try:
            result = calls[request.path](await request.json() if request.can_read_body else {})
            return web.json_response(await result if asyncio.iscoroutine(result) else result)
        except Exception as error:  # noqa: BLE001  (the request's boundary: the client shows it)
            return web.Response(status=500, text=f"{type(error).__name__}: {error}")

    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", answer)
    return app


def main() -> None:
    """Serve until the engine that started it ends."""
    begins = os.environ.get("CORE_RL_SERVER_SIDE")  # of the engine; none where it is started by hand
    key = runpy.run_path(begins)["begin"]() if begins else ""
    parser = argparse.ArgumentParser()
    for name in ("--model", "--host", "--dtype", "--device"):
        parser.add_argument(name)
    for name in ("--port", "--seed"):
        parser.add_argument(name, type=int)
    arguments = parser.parse_args()
    server = ModelServer(arguments.model, arguments.dtype, arguments.device, arguments.seed)
    web.run_app(application(server, key), host=arguments.host, port=arguments.port, print=None)


if __name__ == "__main__":
    main()
