"""The Python package against an in-process server whose first upload stream breaks."""
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from concurrent import futures

import grpc

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def load():
    """A copy of the package with fresh stubs, so that the source tree stays clean."""
    folder = tempfile.mkdtemp(prefix="stillhouse-python-")
    shutil.copytree(os.path.join(ROOT, "client/python"), os.path.join(folder, "client/python"))
    os.symlink(os.path.join(ROOT, "proto"), os.path.join(folder, "proto"))
    subprocess.run([os.path.join(folder, "client/python/generate.sh")], check=True,
                   env=dict(os.environ, PYTHON=sys.executable))
    sys.path.insert(0, os.path.join(folder, "client/python"))
    return folder


FOLDER = load()
import stillhouse  # noqa: E402
from stillhouse import v1  # noqa: E402
from stillhouse.v1 import (caches_pb2_grpc, corpora_pb2_grpc, inference_pb2_grpc, operations_pb2_grpc,  # noqa: E402
                           server_pb2_grpc)


def refuse(context, code, message, reason):
    status = v1.errors.Status(code=code.value[0], message=message)
    info = v1.errors.ErrorInfo(reason=reason, domain="stillhouse")
    status.details.add(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=info.SerializeToString())
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(code, message)


class Corpora(corpora_pb2_grpc.CorporaServicer):
    def __init__(self):
        self.data = b""
        self.breaks = 1
        self.key = None

    def GetUpload(self, request, context):
        if not self.data:
            refuse(context, grpc.StatusCode.NOT_FOUND, "There is no such upload.", "UPLOAD_NOT_FOUND")
        return v1.corpora.Upload(committed_bytes=len(self.data))

    def UploadCorpus(self, requests, context):
        self.key = dict(context.invocation_metadata()).get("authorization")
        header = next(requests).header
        for request in requests:
            assert request.chunk.offset == len(self.data)
            self.data += request.chunk.data
            if self.breaks:
                self.breaks -= 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "Connection reset by peer")
        assert hashlib.sha256(self.data).hexdigest() == header.sha256
        return v1.corpora.Corpus(name=f"{header.parent}/corpora/{header.corpus_id}", size_bytes=len(self.data))


class Caches(caches_pb2_grpc.CachesServicer):
    def BuildCache(self, request, context):
        self.request = request
        return v1.operations.Operation(name="operations/1")

    def GetCache(self, request, context):
        if request.name.endswith("/missing"):
            refuse(context, grpc.StatusCode.NOT_FOUND, "There is no such cache.", "CACHE_NOT_FOUND")
        return v1.caches.Cache(name=request.name, slots=7)


class Operations(operations_pb2_grpc.OperationsServicer):
    waits = 0
    fail = False
    away = 0  # calls that find the server restarting

    def WaitOperation(self, request, context):
        if self.away:
            self.away -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "Connection refused")
        self.waits += 1
        operation = v1.operations.Operation(name=request.name, done=self.waits >= 2)
        operation.metadata.fraction = self.waits / 2
        if operation.done and self.fail:
            operation.error.code, operation.error.message, operation.error.reason = 9, "Too short.", "CORPUS_TOO_SHORT"
        elif operation.done:
            operation.cache = "tenants/t/corpora/doc/caches/k"
        return operation


class Inference(inference_pb2_grpc.InferenceServicer):
    def Query(self, request, context):
        self.request = request
        yield v1.inference.QueryEvent(accepted=v1.inference.Accepted(model="m"))
        for text in ("Hel", "", "lo"):
            yield v1.inference.QueryEvent(token=v1.inference.Token(text=text))
        yield v1.inference.QueryEvent(finish=v1.inference.Finish(reason=v1.inference.Finish.END_OF_TURN))


class Server(server_pb2_grpc.ServerServicer):
    def GetServerInfo(self, request, context):
        return v1.server.ServerInfo(tenant="tenants/t")


class PythonClientTest(unittest.TestCase):
    def setUp(self):
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        self.corpora, self.caches, self.operations, self.inference = Corpora(), Caches(), Operations(), Inference()
        corpora_pb2_grpc.add_CorporaServicer_to_server(self.corpora, self.server)
        caches_pb2_grpc.add_CachesServicer_to_server(self.caches, self.server)
        operations_pb2_grpc.add_OperationsServicer_to_server(self.operations, self.server)
        inference_pb2_grpc.add_InferenceServicer_to_server(self.inference, self.server)
        server_pb2_grpc.add_ServerServicer_to_server(Server(), self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        self.house = stillhouse.Client(f"127.0.0.1:{port}", key="the-key")

    def tearDown(self):
        self.house.close()
        self.server.stop(None)

    def test_upload_goes_on_after_a_broken_stream(self):
        data = os.urandom(700_000)
        corpus = self.house.upload("doc", data)
        self.assertEqual(corpus.name, "tenants/t/corpora/doc")
        self.assertEqual(self.corpora.data, data)
        self.assertEqual(self.corpora.key, "Bearer the-key")

    def test_build_reports_and_returns_the_cache(self):
        fractions = []
        cache = self.house.build("doc", method=v1.types.CARTRIDGE, profile=v1.caches.QUICK,
                                 progress=lambda operation: fractions.append(operation.metadata.fraction))
        self.assertEqual(cache.slots, 7)
        self.assertEqual(fractions, [0.5, 1.0])
        self.assertEqual(self.caches.request.parent, "tenants/t/corpora/doc")
        self.assertEqual(len(self.caches.request.request_id), 36)

    def test_a_restarting_server_is_waited_for(self):
        self.operations.away = 2
        self.assertEqual(self.house.build("doc").slots, 7)
        self.assertEqual(self.operations.away, 0)

    def test_a_failed_build_raises_its_error(self):
        self.operations.fail = True
        with self.assertRaises(stillhouse.Error) as caught:
            self.house.build("doc")
        self.assertEqual((caught.exception.code, caught.exception.reason), ("FAILED_PRECONDITION", "CORPUS_TOO_SHORT"))

    def test_ask_streams_text(self):
        self.assertEqual("".join(self.house.ask("Hi?", caches=["doc/k"], temperature=0.0, max_tokens=5)), "Hello")
        self.assertEqual(list(self.inference.request.caches), ["tenants/t/corpora/doc/caches/k"])
        self.assertTrue(self.inference.request.sampling.HasField("temperature"))
        self.assertFalse(self.inference.request.sampling.HasField("top_p"))

    def test_errors_carry_the_servers_words(self):
        with self.assertRaises(stillhouse.Error) as caught:
            self.house._call(self.house.caches.GetCache, v1.caches.GetCacheRequest(name=self.house.name("doc/missing")))
        self.assertEqual(str(caught.exception), "There is no such cache.")
        self.assertEqual(caught.exception.reason, "CACHE_NOT_FOUND")

    def test_keys_stay_home_without_tls(self):
        for address in ("example.org:7070", "127.example.org:7070", "localhost.example.org:7070", "0.0.0.0:7070"):
            with self.assertRaises(ValueError, msg=address):
                stillhouse.Client(address, key="secret")
        for address in ("localhost:7070", "127.0.0.2:7070", "[::1]:7070", "unix:/run/stillhouse"):
            stillhouse.Client(address, key="secret").close()


if __name__ == "__main__":
    try:
        unittest.main()
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
