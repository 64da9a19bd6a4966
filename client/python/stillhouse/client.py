"""Upload documents, build memories of them, ask questions."""

import hashlib
import ipaddress
import os
import time
import uuid

import grpc

from stillhouse import messages as v1
from stillhouse.v1 import caches_pb2_grpc, corpora_pb2_grpc, inference_pb2_grpc, operations_pb2_grpc, server_pb2_grpc

_CHUNK = 256 * 1024
_ATTEMPTS = 6
_TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


class Error(Exception):
    """A refused call or a failed operation: the server's sentence, its `code` (such as "NOT_FOUND") and `reason`."""

    def __init__(self, message, code, reason=""):
        super().__init__(message)
        self.code = code
        self.reason = reason


def _error(call):
    reason = ""
    for key, value in call.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in v1.errors.Status.FromString(value).details:
                if detail.type_url.endswith(".ErrorInfo"):
                    reason = v1.errors.ErrorInfo.FromString(detail.value).reason
    return Error(call.details(), call.code().name, reason)


def _is_local(address):
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0]
    try:
        return host in ("localhost", "[::1]") or ipaddress.IPv4Address(host).is_loopback
    except ValueError:  # a host name, such as 127.example.org
        return False


class Client:
    """One connection. Thread-safe. Names are short ("handbook", "handbook/quick") or full ("tenants/…")."""

    def __init__(self, address="127.0.0.1:7070", key=None, credentials=None):
        """`credentials`: grpc.ssl_channel_credentials(…) for TLS. `key`: default from STILLHOUSE_KEY."""
        key = os.environ.get("STILLHOUSE_KEY", "") if key is None else key
        options = [("grpc.max_receive_message_length", 64 << 20), ("grpc.keepalive_time_ms", 60000)]
        if credentials is not None:
            self._channel = grpc.secure_channel(address, credentials, options)
        else:
            if _is_local(address):
                options.append(("grpc.enable_http_proxy", 0))
            elif key:
                raise ValueError("the key would travel unencrypted to another host: pass credentials= for TLS")
            self._channel = grpc.insecure_channel(address, options)
        self._metadata = (("authorization", "Bearer " + key),) if key else ()
        self.corpora = corpora_pb2_grpc.CorporaStub(self._channel)
        self.caches = caches_pb2_grpc.CachesStub(self._channel)
        self.inference = inference_pb2_grpc.InferenceStub(self._channel)
        self.operations = operations_pb2_grpc.OperationsStub(self._channel)
        self.server = server_pb2_grpc.ServerStub(self._channel)
        self._tenant = None

    def close(self):
        self._channel.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def metadata(self):
        """For calls on the stubs themselves: `house.corpora.GetCorpus(request, metadata=house.metadata)`."""
        return self._metadata

    def _call(self, method, request):
        try:
            return method(request, metadata=self._metadata)
        except grpc.RpcError as call:
            raise _error(call) from None

    def _patiently(self, method, request):
        """A call that may be sent again, while the server cannot be reached or is restarting."""
        for attempt in range(1, _ATTEMPTS):
            try:
                return self._call(method, request)
            except Error as error:
                if error.code != "UNAVAILABLE":
                    raise
            time.sleep(min(8.0, 0.25 * 2 ** (attempt - 1)))
        return self._call(method, request)

    def tenant(self):
        """The full name of the tenant that this client speaks for."""
        if self._tenant is None:
            self._tenant = self._call(self.server.GetServerInfo, v1.server.GetServerInfoRequest()).tenant
        return self._tenant

    def name(self, text):
        """The full name of a corpus ("handbook") or a cache ("handbook/quick")."""
        if text.startswith("tenants/"):
            return text
        corpus, _, cache = text.partition("/")
        name = f"{self.tenant()}/corpora/{corpus}"
        return f"{name}/caches/{cache}" if cache else name

    def upload(self, corpus_id, data, title="", media_type="text/plain", attempts=_ATTEMPTS):
        """Sends a document (bytes or str) and returns the sealed Corpus; goes on after a broken stream."""
        if isinstance(data, str):
            data = data.encode()
        header = v1.corpora.UploadHeader(
            parent=self.tenant(), corpus_id=corpus_id, display_name=title, media_type=media_type,
            size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

        def parts(offset):
            yield v1.corpora.UploadCorpusRequest(header=header)
            for start in range(offset, len(data), _CHUNK):
                chunk = v1.corpora.UploadChunk(offset=start, data=data[start:start + _CHUNK])
                yield v1.corpora.UploadCorpusRequest(chunk=chunk)

        for attempt in range(1, attempts + 1):
            offset = 0
            try:
                upload = self._patiently(self.corpora.GetUpload, v1.corpora.GetUploadRequest(header=header))
                if upload.HasField("corpus"):
                    return upload.corpus
                offset = upload.committed_bytes
            except Error as error:
                if error.code != "NOT_FOUND":
                    raise
            try:
                return self.corpora.UploadCorpus(parts(offset), metadata=self._metadata)
            except grpc.RpcError as call:
                error = _error(call)
                if call.code() not in _TRANSIENT or error.reason or attempt == attempts:
                    raise error from None
            time.sleep(min(8.0, 0.25 * 2 ** (attempt - 1)))
        raise AssertionError("unreachable")

    def build(self, corpus, cache_id="", wait=True, progress=None, **fields):
        """Builds a memory and returns it as a Cache (or the Operation, with wait=False).

        `fields`: fields of BuildCacheRequest, such as method, profile, slots, compression_ratio, evaluation.
        `progress(operation)` is called about twice a second.
        """
        request = v1.caches.BuildCacheRequest(
            parent=self.name(corpus), cache_id=cache_id, request_id=str(uuid.uuid4()), **fields)
        operation = self._patiently(self.caches.BuildCache, request)
        if not wait:
            return operation
        wanted = v1.operations.WaitOperationRequest(name=operation.name)
        wanted.timeout.FromMilliseconds(500)
        while not operation.done:
            operation = self._patiently(self.operations.WaitOperation, wanted)
            if progress is not None:
                progress(operation)
        if operation.HasField("error"):
            failure = operation.error
            code = {c.value[0]: c.name for c in grpc.StatusCode}.get(failure.code, str(failure.code))
            raise Error(failure.message, code, failure.reason)
        return self._patiently(self.caches.GetCache, v1.caches.GetCacheRequest(name=operation.cache))

    def events(self, messages, caches=(), **sampling):
        """Streams the QueryEvents of an answer. `messages`: a question, or a list of (role, content)."""
        if isinstance(messages, str):
            messages = [("user", messages)]
        request = v1.inference.QueryRequest(
            caches=[self.name(c) for c in caches],
            messages=v1.inference.Messages(
                messages=[v1.inference.Message(role=role, content=content) for role, content in messages]),
            sampling=v1.inference.SamplingOptions(**sampling))
        stream = self.inference.Query(request, metadata=self._metadata)
        try:
            yield from stream
        except grpc.RpcError as call:
            raise _error(call) from None
        finally:
            # A caller that stops reading frees what the answer holds on the server.
            stream.cancel()

    def ask(self, messages, caches=(), **sampling):
        """Streams the text of an answer. Keywords: temperature, top_p, max_tokens, seed, stop, …"""
        for event in self.events(messages, caches, **sampling):
            if event.HasField("token") and event.token.text:
                yield event.token.text
