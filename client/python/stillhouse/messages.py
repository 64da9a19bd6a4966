"""The generated message modules under short names: `v1.caches.BuildCacheRequest`, `v1.types.CARTRIDGE`."""

try:
    from stillhouse.v1 import caches_pb2 as caches
    from stillhouse.v1 import corpora_pb2 as corpora
    from stillhouse.v1 import errors_pb2 as errors
    from stillhouse.v1 import inference_pb2 as inference
    from stillhouse.v1 import operations_pb2 as operations
    from stillhouse.v1 import server_pb2 as server
    from stillhouse.v1 import tenants_pb2 as tenants
    from stillhouse.v1 import types_pb2 as types
except ModuleNotFoundError as missing:
    if missing.name and missing.name.startswith("stillhouse.v1"):
        raise ImportError("stillhouse: the stubs were not generated; run client/python/generate.sh first") from missing
    raise

__all__ = ["caches", "corpora", "errors", "inference", "operations", "server", "tenants", "types"]
