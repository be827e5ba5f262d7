"""Operations over the sharded tensors of an engine: norm, gathering, digests, host copies."""
