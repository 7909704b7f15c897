"""The entry point for `DistributedDataParallel`: one call registers the hook."""

from gradsieve.ddp.entry import attach

__all__ = ["attach"]
