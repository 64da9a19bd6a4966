"""Uploads: nothing is visible until the last byte and the hash are right, and nothing that was committed is lost."""
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
import unittest
import uuid

import grpc
from harness import CHUNK, DOCUMENT, Server, ServerCase, tiny_model, upload_header, upload_messages
from stillhouse.v1 import corpora_pb2, types_pb2

CODE = grpc.StatusCode


def chunk(offset, data):
    return corpora_pb2.UploadCorpusRequest(chunk=corpora_pb2.UploadChunk(offset=offset, data=data))


class Uploads(ServerCase):
    def send(self, *messages):
        return self.server.corpora.UploadCorpus(iter(messages), timeout=30)

    def head(self, corpus_id, data, **fields):
        return corpora_pb2.UploadCorpusRequest(header=upload_header(corpus_id, data, **fields))

    def assert_absent(self, corpus_id):
        with self.assert_code(CODE.NOT_FOUND):
            self.server.corpora.GetCorpus(corpora_pb2.GetCorpusRequest(name=f"tenants/default/corpora/{corpus_id}"))
        listed = self.server.corpora.ListCorpora(corpora_pb2.ListCorporaRequest()).corpora
        self.assertNotIn(corpus_id, [c.name.split("/")[-1] for c in listed])

    def test_round_trip_and_idempotence(self):
        data = os.urandom(300_000)
        corpus = self.server.upload("round-trip", data, chunk=70_000, display_name="Round trip")
        self.assertEqual(corpus.size_bytes, len(data))
        self.assertEqual(corpus.sha256, hashlib.sha256(data).hexdigest())
        self.assertEqual(self.server.upload("round-trip", data, display_name="Round trip").etag, corpus.etag)
        with self.assert_code(CODE.ALREADY_EXISTS):
            self.server.upload("round-trip", data + b"x")

    def test_gap(self):
        data = b"a" * 200_000
        with self.assert_code(CODE.OUT_OF_RANGE):
            self.send(self.head("gap", data), chunk(0, data[:1000]), chunk(2000, data[2000:]))
        self.assert_absent("gap")

    def test_overlap_with_equal_bytes_is_accepted_and_with_other_bytes_refused(self):
        data = os.urandom(5000)
        with self.assert_code(CODE.INVALID_ARGUMENT):
            self.send(self.head("overlap", data), chunk(0, data[:3000]), chunk(1000, b"z" * 2000), chunk(3000, data[3000:]))
        self.assert_absent("overlap")
        corpus = self.send(self.head("overlap", data), chunk(0, data[:3000]), chunk(1000, data[1000:3000]), chunk(3000, data[3000:]))
        self.assertEqual(corpus.size_bytes, 5000)

    def test_wrong_hash(self):
        data = b"the bytes"
        with self.assert_code(CODE.INVALID_ARGUMENT, CODE.DATA_LOSS):
            self.send(self.head("wrong-hash", data, sha256="0" * 64), chunk(0, data))
        self.assert_absent("wrong-hash")
        self.assertEqual(self.server.upload("wrong-hash", data).size_bytes, 9)

    def test_no_end_then_resume(self):
        data = os.urandom(400_000)
        with self.assert_code(CODE.FAILED_PRECONDITION, CODE.OUT_OF_RANGE, CODE.INVALID_ARGUMENT, CODE.ABORTED):
            self.send(self.head("no-end", data), chunk(0, data[:CHUNK]), chunk(CHUNK, data[CHUNK:2 * CHUNK]))
        self.assert_absent("no-end")
        state = self.server.corpora.GetUpload(corpora_pb2.GetUploadRequest(header=upload_header("no-end", data)))
        self.assertEqual(state.committed_bytes, 2 * CHUNK)
        corpus = self.server.corpora.UploadCorpus(upload_messages("no-end", data, offset=state.committed_bytes), timeout=30)
        self.assertEqual(corpus.size_bytes, len(data))

    def test_too_much_too_little_and_nothing(self):
        data = b"b" * 1000
        with self.assert_code(CODE.INVALID_ARGUMENT, CODE.OUT_OF_RANGE):
            self.send(self.head("too-much", data), chunk(0, data + b"more"))
        self.assert_absent("too-much")
        with self.assert_code(CODE.INVALID_ARGUMENT):
            self.send(self.head("nothing", b""))
        with self.assert_code(CODE.INVALID_ARGUMENT):
            self.send(chunk(0, data))
        with self.assert_code(CODE.INVALID_ARGUMENT):
            self.server.corpora.UploadCorpus(iter(()), timeout=10)
        with self.assert_code(CODE.INVALID_ARGUMENT):
            self.send(self.head("big-chunk", b"c" * (3 << 20)), chunk(0, b"c" * (2 << 20)))

    def test_hostile_ids(self):
        for bad in ("", "UPPER", "1digit", "-dash", "dash-", "a/b", "../x", "a" * 64, "ü", "a b", "a\n"):
            with self.subTest(bad=bad), self.assert_code(CODE.INVALID_ARGUMENT):
                self.server.upload(bad, b"x")
        for header in (dict(sha256="xyz"), dict(size_bytes=-1), dict(size_bytes=1 << 62), dict(parent="tenants/"), dict(request_id="no")):
            with self.subTest(header=header), self.assert_code(CODE.INVALID_ARGUMENT, CODE.OUT_OF_RANGE, CODE.RESOURCE_EXHAUSTED):
                self.server.upload("fine", b"x", **header)

    def test_request_ids(self):
        request_id = str(uuid.uuid4())
        first = self.server.upload("with-id", b"one", request_id=request_id)
        self.assertEqual(self.server.upload("with-id", b"one", request_id=request_id).etag, first.etag)
        with self.assert_code(CODE.ALREADY_EXISTS, CODE.INVALID_ARGUMENT):
            self.server.upload("with-id-2", b"two", request_id=request_id)

    def test_paging(self):
        for i in range(5):
            self.server.upload(f"page-{i}", b"p%d" % i)
        seen, token = [], ""
        while True:
            page = self.server.corpora.ListCorpora(corpora_pb2.ListCorporaRequest(page_size=2, page_token=token))
            self.assertLessEqual(len(page.corpora), 2)
            seen += [c.name for c in page.corpora]
            token = page.next_page_token
            if not token:
                break
        self.assertEqual(seen, sorted(seen))
        self.assertTrue({f"tenants/default/corpora/page-{i}" for i in range(5)} <= set(seen))
        with self.assert_code(CODE.INVALID_ARGUMENT):
            self.server.corpora.ListCorpora(corpora_pb2.ListCorporaRequest(page_token="garbage"))

    def test_delete(self):
        self.server.upload("gone", b"x")
        self.server.corpora.DeleteCorpus(corpora_pb2.DeleteCorpusRequest(name="tenants/default/corpora/gone"))
        self.assert_absent("gone")
        with self.assert_code(CODE.NOT_FOUND):
            self.server.corpora.DeleteCorpus(corpora_pb2.DeleteCorpusRequest(name="tenants/default/corpora/gone"))

    def test_one_line_of_100_megabytes(self):
        data = b"word " * (20 << 20)
        corpus = self.server.corpora.UploadCorpus(upload_messages("long-line", data, chunk=1 << 20), timeout=120)
        self.assertEqual(corpus.size_bytes, len(data))
        # Longer than any memory can stand for, or long work: either way a clear answer, and the server goes on.
        operation = self.server.build("long-line", "c", types_pb2.FULL, wait=False)
        self.server.operations.CancelOperation(self.request_cancel(operation.name))
        operation = self.server.wait(operation.name)
        self.assertTrue(operation.HasField("error"))
        self.assertTrue(operation.error.message)

    @staticmethod
    def request_cancel(name):
        from stillhouse.v1 import operations_pb2
        return operations_pb2.CancelOperationRequest(name=name)


class Crashes(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="stillhouse-e2e-")
        self.server = Server(self.folder)

    def tearDown(self):
        self.server.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def test_kill_in_the_middle_of_an_upload(self):
        data = os.urandom(6 << 20)
        header = upload_header("killed", data)
        arrived = threading.Event()

        def messages():
            yield corpora_pb2.UploadCorpusRequest(header=header)
            for begin in range(0, len(data), CHUNK):
                yield chunk(begin, data[begin:begin + CHUNK])
                if begin > 2 << 20:
                    arrived.set()
                    time.sleep(0.05)

        call = self.server.corpora.UploadCorpus.future(messages())
        self.assertTrue(arrived.wait(30))
        time.sleep(0.1)
        self.server.kill()
        with self.assertRaises(grpc.RpcError):
            call.result()
        self.server.start()
        self.assertEqual(len(self.server.corpora.ListCorpora(corpora_pb2.ListCorporaRequest()).corpora), 0)
        state = self.server.corpora.GetUpload(corpora_pb2.GetUploadRequest(header=header))
        self.assertLessEqual(state.committed_bytes, len(data))
        corpus = self.server.corpora.UploadCorpus(upload_messages("killed", data, offset=state.committed_bytes), timeout=60)
        self.assertEqual(corpus.sha256, hashlib.sha256(data).hexdigest())

    def test_a_second_server_on_the_same_store_is_refused(self):
        command = [self.server.process.args[0], "--model", self.server.model, "--store", self.server.store, "--address", "127.0.0.1:0",
                   "--metrics-address", ""]
        second = subprocess.run(command, capture_output=True, text=True, timeout=60)
        self.assertNotEqual(second.returncode, 0)
        self.assertIn("store", second.stderr)


@unittest.skipUnless(os.geteuid() == 0, "a small file system of its own needs root")
class FullDisk(unittest.TestCase):
    def test_a_full_disk_is_resource_exhausted_and_nothing_is_half_visible(self):
        folder = tempfile.mkdtemp(prefix="stillhouse-e2e-")
        disk = os.path.join(folder, "disk")
        os.mkdir(disk)
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "none", disk], capture_output=True, text=True)
        self.assertEqual(mounted.returncode, 0, mounted.stderr)
        server = None
        try:
            server = Server(folder, model=tiny_model(folder), store=os.path.join(disk, "store"))
            data = os.urandom(4 << 20)
            stored, refused = [], None
            for i in range(40):
                try:
                    server.upload(f"c-{i:02}", data + b"%d" % i)
                    stored.append(f"c-{i:02}")
                except grpc.RpcError as error:
                    refused = error
                    break
            self.assertIsNotNone(refused)
            self.assertEqual(refused.code(), CODE.RESOURCE_EXHAUSTED, refused.details())
            listed = [c.name.split("/")[-1] for c in server.corpora.ListCorpora(corpora_pb2.ListCorporaRequest()).corpora]
            self.assertEqual(listed, stored)
            # Room again: the server works without a restart.
            server.corpora.DeleteCorpus(corpora_pb2.DeleteCorpusRequest(name=f"tenants/default/corpora/{stored[0]}"))
            server.upload("after", DOCUMENT)
        finally:
            if server:
                server.kill()
            subprocess.run(["umount", disk], check=False)
            shutil.rmtree(folder, ignore_errors=True)
