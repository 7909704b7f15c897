"""The way in for `DistributedDataParallel`: one call registers the hook."""

from gradsieve.ddp.entry import attach

__all__ = ["attach"]
