"""A server process on free loopback ports with a store of its own, and a thin client."""
import contextlib
import hashlib
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
import unittest
import urllib.request

import grpc
from stillhouse.v1 import caches_pb2, caches_pb2_grpc, corpora_pb2, corpora_pb2_grpc, errors_pb2, inference_pb2
from stillhouse.v1 import inference_pb2_grpc, operations_pb2, operations_pb2_grpc, server_pb2, server_pb2_grpc
from stillhouse.v1 import tenants_pb2_grpc, types_pb2

BUILD = os.environ["STILLHOUSE_BUILD"]
READY_SECONDS = 60
CHUNK = 64 * 1024


def tiny_model(folder, seed=1, context=512):
    path = os.path.join(folder, f"tiny-{seed}-{context}.gguf")
    subprocess.run([f"{BUILD}/bin/make_tiny_model", path, "--seed", str(seed), "--context", str(context)], check=True)
    return path


class Server:
    """One server process. `stop` ends it in order, `kill` with SIGKILL; `start` may be called again on the same store."""

    def __init__(self, folder, *flags, model=None, store=None):
        self.folder = folder
        self.model = model or tiny_model(folder)
        self.store = store or os.path.join(folder, "store")
        self.flags = list(flags)
        if "STILLHOUSE_TEST_DEVICE" in os.environ:  # cuda: the same suites on a GPU
            self.flags += ["--device", os.environ["STILLHOUSE_TEST_DEVICE"]]
        self.process = None
        self.start()

    def start(self, *more):
        command = [f"{BUILD}/bin/stillhouse-server", "--model", self.model, "--store", self.store, "--address", "127.0.0.1:0",
                   "--metrics-address", "127.0.0.1:0", "--threads", "2", *self.flags, *more]
        self.log = open(os.path.join(self.folder, "server.log"), "ab")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log)
        line = self._first_line()
        match = re.search(r"listening on (\S+?),? metrics on http://(\S+?)/metrics", line)
        if not match:
            self.kill()
            raise AssertionError(f"no ready line: {line!r}\n{self.log_text()}")
        self.address, self.metrics_address = match.group(1), match.group(2)
        self.connect()

    def _first_line(self):
        deadline = time.monotonic() + READY_SECONDS
        text = b""
        while b"\n" not in text and time.monotonic() < deadline:
            ready, _, _ = select.select([self.process.stdout], [], [], 0.2)
            if ready:
                piece = os.read(self.process.stdout.fileno(), 4096)
                if not piece:
                    break
                text += piece
        return text.decode()

    def connect(self, key=None):
        self.channel = grpc.insecure_channel(self.address)
        self.stubs(self.channel)

    def stubs(self, channel):
        self.corpora = corpora_pb2_grpc.CorporaStub(channel)
        self.caches = caches_pb2_grpc.CachesStub(channel)
        self.inference = inference_pb2_grpc.InferenceStub(channel)
        self.operations = operations_pb2_grpc.OperationsStub(channel)
        self.info = server_pb2_grpc.ServerStub(channel)
        self.tenants = tenants_pb2_grpc.TenantsStub(channel)

    def alive(self):
        return self.process is not None and self.process.poll() is None

    def _close(self):
        self.channel.close()
        self.process.stdout.close()
        self.log.close()
        self.process = None

    def kill(self):
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        if hasattr(self, "channel"):
            self._close()

    def stop(self):
        if self.process is None:
            return 0
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=60)
        self._close()
        return code

    def log_text(self):
        with open(os.path.join(self.folder, "server.log"), errors="replace") as f:
            return f.read()[-4000:]

    # ---- metrics
    def metrics(self):
        with urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=10) as r:
            return r.read().decode()

    def metric(self, name, **labels):
        """Sum of the samples of `name` whose labels include `labels`; 0 if there are none."""
        total = 0.0
        for line in self.metrics().splitlines():
            match = re.match(r"([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)$", line)
            if match and match.group(1) == name:
                have = dict(re.findall(r'(\w+)="([^"]*)"', match.group(2) or ""))
                if all(have.get(k) == v for k, v in labels.items()):
                    total += float(match.group(3))
        return total

    # ---- documents
    def upload(self, corpus_id, data, **kwargs):
        return self.corpora.UploadCorpus(upload_messages(corpus_id, data, **kwargs), timeout=60)

    def build(self, corpus_id, cache_id, method=types_pb2.CARTRIDGE, wait=True, **fields):
        request = caches_pb2.BuildCacheRequest(parent=f"tenants/default/corpora/{corpus_id}", cache_id=cache_id, method=method,
                                               **fields)
        operation = self.caches.BuildCache(request, timeout=30)
        return self.wait(operation.name) if wait else operation

    def wait(self, name, seconds=240):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            operation = self.operations.WaitOperation(operations_pb2.WaitOperationRequest(name=name), timeout=90)
            if operation.done:
                return operation
        raise AssertionError(f"{name} is not done after {seconds} s: {operation}\n{self.log_text()}")

    # ---- questions
    def query_stream(self, prompt=None, messages=None, caches=(), request_id="", timeout=60, **sampling):
        request = inference_pb2.QueryRequest(caches=list(caches), request_id=request_id,
                                             sampling=inference_pb2.SamplingOptions(**sampling))
        if messages is not None:
            request.messages.messages.extend(inference_pb2.Message(role=r, content=c) for r, c in messages)
        else:
            request.prompt = prompt
        return self.inference.Query(request, timeout=timeout)

    def query(self, *args, **kwargs):
        return Answer(list(self.query_stream(*args, **kwargs)))


class Answer:
    def __init__(self, events):
        self.accepted = events[0].accepted
        assert events[0].WhichOneof("event") == "accepted", events[0]
        assert events[-1].WhichOneof("event") == "finish", events[-1]
        self.finish = events[-1].finish
        self.pieces = [e.token.text for e in events if e.WhichOneof("event") == "token"]
        self.infos = [t for e in events if e.WhichOneof("event") == "token" for t in e.token.tokens]
        self.ids = [t.id for t in self.infos]
        self.text = "".join(self.pieces)
        self.reason = inference_pb2.Finish.Reason.Name(self.finish.reason)


def upload_messages(corpus_id, data, chunk=CHUNK, header=None, offset=0, **fields):
    header = header or upload_header(corpus_id, data, **fields)
    yield corpora_pb2.UploadCorpusRequest(header=header)
    for begin in range(offset, len(data), chunk):
        yield corpora_pb2.UploadCorpusRequest(chunk=corpora_pb2.UploadChunk(offset=begin, data=data[begin:begin + chunk]))


def upload_header(corpus_id, data, **fields):
    values = dict(corpus_id=corpus_id, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    values.update(fields)
    return corpora_pb2.UploadHeader(**values)


def cache_name(corpus_id, cache_id, tenant="default"):
    return f"tenants/{tenant}/corpora/{corpus_id}/caches/{cache_id}"


# A build that takes moments with the tiny model.
QUICK_STUDY = dict(conversations=12, max_question_tokens=12, max_answer_tokens=12)
QUICK_TRAINING = dict(steps=6, rows_per_step=2, evaluate_every=3)
DOCUMENT = ("The lighthouse at Skerry Point was built in 1843 by Anna Holm. Its lamp burns colza oil. The keeper climbs 199 steps. "
            "In winter the bell rings every two minutes.\n\n" * 6).encode()


class ServerCase(unittest.TestCase):
    """Server flags in FLAGS; one server for the class."""
    FLAGS = ()

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="stillhouse-e2e-")
        cls.server = Server(cls.folder, *cls.FLAGS)

    @classmethod
    def tearDownClass(cls):
        try:
            code = cls.server.stop()
            assert code == 0, f"the server ended with {code}\n{cls.server.log_text()}"
        finally:
            cls.server.kill()
            shutil.rmtree(cls.folder, ignore_errors=True)

    def tearDown(self):
        self.assertTrue(self.server.alive(), f"the server died\n{self.server.log_text()}")

    @contextlib.contextmanager
    def assert_code(self, *codes):
        with self.assertRaises(grpc.RpcError) as caught:
            yield caught
        self.assertIn(caught.exception.code(), codes, caught.exception.details())
        details = caught.exception.details()
        self.assertTrue(details, "an error without a sentence")
        for inside in (self.folder, os.path.dirname(BUILD), tempfile.gettempdir(), ".cc:", "0x"):
            self.assertNotIn(inside, details)

    @staticmethod
    def reason(caught):
        status = errors_pb2.Status.FromString(dict(caught.exception.trailing_metadata())["grpc-status-details-bin"])
        info = errors_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        return info.reason

    def eventually(self, condition, seconds=20, what="the condition"):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if condition():
                return
            time.sleep(0.02)
        self.fail(f"{what} did not come true in {seconds} s")
