"""Builds: progress, cancellation, restarts, odd documents, damaged artifacts, export and import."""
import glob
import hashlib
import json
import os
import shutil
import tempfile
import time
import unittest
import uuid

import grpc
from harness import CHUNK, DOCUMENT, QUICK_STUDY, QUICK_TRAINING, Server, ServerCase, cache_name
from stillhouse.v1 import caches_pb2, operations_pb2, types_pb2

CODE = grpc.StatusCode


def recipe(**more):
    fields = dict(self_study=caches_pb2.SelfStudyOptions(**QUICK_STUDY), training=caches_pb2.TrainingOptions(**QUICK_TRAINING),
                  compression_ratio=8)
    fields.update(more)
    return fields


class Builds(ServerCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.server.upload("doc", DOCUMENT[:360])

    def built(self, cache_id, method, corpus="doc", **fields):
        operation = self.server.build(corpus, cache_id, method, **fields)
        self.assertFalse(operation.HasField("error"), operation.error)
        self.assertEqual(operation.cache, cache_name(corpus, cache_id))
        return self.server.caches.GetCache(caches_pb2.GetCacheRequest(name=operation.cache))

    def test_cartridge_and_its_report(self):
        cache = self.built("trained", types_pb2.CARTRIDGE, evaluation=caches_pb2.EvaluationOptions(questions=["Who built it?", "When?"]),
                           **recipe())
        self.assertEqual(cache.method, types_pb2.CARTRIDGE)
        self.assertGreater(cache.slots, 1)
        self.assertLess(cache.slots, cache.corpus_tokens)
        rows = {r.memory: r for r in cache.quality.rows}
        self.assertTrue({"none", "full", "cache", "truncated"} <= set(rows))
        self.assertEqual(cache.quality.questions, 2)
        self.assertEqual(cache.quality.question_source, "uploaded")
        self.assertGreater(cache.quality.training_tokens, 0)
        self.assertEqual(json.loads(cache.provenance_json)["method"], "CARTRIDGE")
        self.assertGreater(cache.canonical_bytes, 0)
        answer = self.server.query(messages=[("user", "Who built it?")], caches=[cache.name], max_tokens=6, ignore_eos=True)
        self.assertEqual(answer.finish.usage.cached_slots, cache.slots)

    def test_attention_matching(self):
        cache = self.built("matched", types_pb2.ATTENTION_MATCHING, self_study=caches_pb2.SelfStudyOptions(**QUICK_STUDY), slots=20)
        self.assertEqual(cache.slots, 20)
        self.assertEqual(cache.quality.training_tokens, 0)

    def test_full_equals_the_document_in_the_prompt(self):
        cache = self.built("whole", types_pb2.FULL)
        with_cache = self.server.query(messages=[("user", "What burns?")], caches=[cache.name], max_tokens=16, ignore_eos=True)
        in_prompt = self.server.query(messages=[("system", DOCUMENT[:360].decode()), ("user", "What burns?")], max_tokens=16,
                                      ignore_eos=True)
        self.assertEqual(with_cache.ids, in_prompt.ids)

    def test_a_corpus_name_stands_for_its_newest_cache(self):
        self.server.upload("newest", DOCUMENT[:200])
        self.built("one", types_pb2.FULL, corpus="newest")
        answer = self.server.query("x", caches=["tenants/default/corpora/newest"], max_tokens=2, ignore_eos=True)
        self.assertEqual(answer.accepted.caches[0].name, cache_name("newest", "one"))

    def test_documents_of_one_and_two_tokens(self):
        for i, data in enumerate((b"a", b"ab")):
            self.server.upload(f"small-{i}", data)
            for method in (types_pb2.FULL, types_pb2.ATTENTION_MATCHING, types_pb2.CARTRIDGE):
                operation = self.server.build(f"small-{i}", f"m{method}", method, **(recipe() if method != types_pb2.FULL else {}))
                if operation.HasField("error"):
                    self.assertTrue(operation.error.message)
                else:
                    self.server.query("x", caches=[operation.cache], max_tokens=2)

    def test_a_document_that_is_not_utf8(self):
        self.server.upload("bytes", bytes(range(256)) * 2)
        operation = self.server.build("bytes", "full", types_pb2.FULL)
        if operation.HasField("error"):
            self.assertTrue(operation.error.message)
        else:
            self.server.query("x", caches=[operation.cache], max_tokens=2)

    def test_full_beyond_the_context_is_refused_with_a_sentence(self):
        self.server.upload("long", DOCUMENT * 6)
        operation = self.server.build("long", "full", types_pb2.FULL)
        self.assertTrue(operation.HasField("error"))
        self.assertIn("context", operation.error.message)

    def test_a_document_longer_than_the_context(self):
        cache = self.built("windows", types_pb2.CARTRIDGE, corpus=self.long_corpus(), **recipe(compression_ratio=40))
        self.assertGreater(cache.corpus_tokens, 512)
        self.assertLess(cache.next_position, 512)
        self.server.query(messages=[("user", "Who?")], caches=[cache.name], max_tokens=4)

    def long_corpus(self):
        self.server.upload("longer", DOCUMENT * 3)
        return "longer"

    def test_existing_ids_and_replacement(self):
        first = self.built("twice", types_pb2.FULL)
        with self.assert_code(CODE.ALREADY_EXISTS):
            self.server.build("doc", "twice", types_pb2.FULL)
        second = self.built("twice", types_pb2.FULL, replace=True)
        self.assertNotEqual(first.etag, second.etag)

    def test_request_ids_make_builds_idempotent(self):
        request_id = str(uuid.uuid4())
        a = self.server.build("doc", "idempotent", types_pb2.FULL, request_id=request_id)
        b = self.server.build("doc", "idempotent", types_pb2.FULL, request_id=request_id, wait=False)
        self.assertEqual(a.name, b.name)
        with self.assert_code(CODE.INVALID_ARGUMENT, CODE.ALREADY_EXISTS):
            self.server.build("doc", "other", types_pb2.FULL, request_id=request_id)

    def test_a_question_that_does_not_fit_ends_with_a_sentence(self):
        question = "x" + "é" * 200
        operation = self.server.build("doc", "asked", types_pb2.FULL,
                                      evaluation=caches_pb2.EvaluationOptions(questions=[question]))
        self.assertIn("that begins \"x" + "é" * 19 + "\"", operation.error.message)

    def test_refusals(self):
        with self.assert_code(CODE.NOT_FOUND):
            self.server.build("missing", "x", types_pb2.FULL)
        with self.assert_code(CODE.UNIMPLEMENTED):
            self.server.build("doc", "still", types_pb2.STILL)
        for bad in (dict(slots=0), dict(slots=-4), dict(compression_ratio=0.5), dict(compression_ratio=float("nan")),
                    dict(training=caches_pb2.TrainingOptions(learning_rate=float("nan"))),
                    dict(training=caches_pb2.TrainingOptions(steps=0)),
                    dict(self_study=caches_pb2.SelfStudyOptions(conversations=0)),
                    dict(self_study=caches_pb2.SelfStudyOptions(temperature=9))):
            with self.subTest(bad=bad), self.assert_code(CODE.INVALID_ARGUMENT):
                self.server.build("doc", "bad", types_pb2.CARTRIDGE, **bad)

    def test_progress_and_cancellation_while_queries_are_answered(self):
        many = recipe(self_study=caches_pb2.SelfStudyOptions(conversations=400, max_answer_tokens=64))
        operation = self.server.build("doc", "cancelled", types_pb2.CARTRIDGE, wait=False, **many)
        get = lambda: self.server.operations.GetOperation(operations_pb2.GetOperationRequest(name=operation.name))
        self.eventually(lambda: get().metadata.fraction > 0 or get().done, what="progress")
        fractions = []
        for _ in range(5):
            self.assertEqual(len(self.server.query("during", max_tokens=8, ignore_eos=True).ids), 8)
            fractions.append(get().metadata.fraction)
        self.assertEqual(fractions, sorted(fractions))
        self.server.operations.CancelOperation(operations_pb2.CancelOperationRequest(name=operation.name))
        done = self.server.wait(operation.name)
        self.assertEqual(done.error.code, CODE.CANCELLED.value[0])
        with self.assert_code(CODE.NOT_FOUND):
            self.server.caches.GetCache(caches_pb2.GetCacheRequest(name=cache_name("doc", "cancelled")))

    def test_export_and_import(self):
        cache = self.built("exported", types_pb2.FULL)
        parts = list(self.server.caches.ExportCache(caches_pb2.ExportCacheRequest(name=cache.name)))
        header, data = parts[0].header, b"".join(p.chunk.data for p in parts[1:])
        self.assertEqual(len(data), header.size_bytes)
        self.assertEqual(hashlib.sha256(data).hexdigest(), header.sha256)
        path = os.path.join(self.folder, header.suggested_file_name)
        with open(path, "wb") as f:
            f.write(data)
        import safetensors
        with safetensors.safe_open(path, framework="numpy") as f:
            self.assertIn("layer.0.k", f.keys())
            self.assertEqual(list(f.get_tensor("layer.0.k").shape)[1], cache.slots)

        def imported(cache_id, content, corpus="doc"):
            yield caches_pb2.ImportCacheRequest(header=caches_pb2.ImportHeader(
                parent=f"tenants/default/corpora/{corpus}", cache_id=cache_id, size_bytes=len(content),
                sha256=hashlib.sha256(content).hexdigest()))
            for begin in range(0, len(content), CHUNK):
                yield caches_pb2.ImportCacheRequest(chunk=caches_pb2.FileChunk(offset=begin, data=content[begin:begin + CHUNK]))

        copy = self.server.caches.ImportCache(imported("imported", data), timeout=30)
        ask = lambda name: self.server.query("q", caches=[name], max_tokens=12, ignore_eos=True).ids
        self.assertEqual(ask(copy.name), ask(cache.name))
        for i, broken in enumerate((data[:-1], data[:200], b"", b"not an artifact", data[:1000] + b"\xff" + data[1001:],
                                    data[:-500] + bytes([data[-500] ^ 1]) + data[-499:])):
            with self.subTest(broken=i), self.assert_code(CODE.DATA_LOSS, CODE.INVALID_ARGUMENT, CODE.FAILED_PRECONDITION):
                self.server.caches.ImportCache(imported(f"broken-{i}", broken), timeout=30)
            with self.assert_code(CODE.NOT_FOUND):
                self.server.caches.GetCache(caches_pb2.GetCacheRequest(name=cache_name("doc", f"broken-{i}")))
        self.assertEqual(self.server.caches.ImportCache(imported("noted", with_note(data, "x" * 1000))).slots, cache.slots)
        self.server.upload("another", DOCUMENT[:361])
        with self.assert_code(CODE.FAILED_PRECONDITION) as caught:
            self.server.caches.ImportCache(imported("foreign", data, "another"))
        self.assertEqual(self.reason(caught), "FOREIGN_DOCUMENT")
        with self.assert_code(CODE.FAILED_PRECONDITION) as caught:
            self.server.caches.ImportCache(imported("endless", altered(data, lambda d: d.update(logical_length=512))))
        self.assertIn("512", caught.exception.details())
        with self.assert_code(CODE.INVALID_ARGUMENT):  # lists would carry it
            self.server.caches.ImportCache(imported("verbose", with_note(data, "x" * (64 << 10))))


def with_note(artifact, note):
    return altered(artifact, lambda described: described["hyperparameters"].update(note=note))


def altered(artifact, change):
    """The artifact with its description changed, and the digest that FORMAT.md asks for."""
    length = int.from_bytes(artifact[:8], "little")
    header = json.loads(artifact[8:8 + length])
    meta = header["__metadata__"]
    described = json.loads(meta["stillhouse.artifact"])
    change(described)
    header["__metadata__"] = {"stillhouse.sha256": "0" * 64, "stillhouse.artifact": json.dumps(described)}
    text = json.dumps(header, separators=(",", ":")).encode()
    whole = len(text).to_bytes(8, "little") + text + artifact[8 + length:]
    return whole[:46] + hashlib.sha256(whole).hexdigest().encode() + whole[110:]


class Restarts(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="stillhouse-e2e-")
        self.server = Server(self.folder)
        self.server.upload("doc", DOCUMENT[:360])

    def tearDown(self):
        self.server.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def ask(self, name):
        return [self.server.query(messages=[("user", q)], caches=[name], max_tokens=24, ignore_eos=True).text
                for q in ("Who built it?", "How many steps?")]

    def test_answers_are_byte_identical_after_a_restart(self):
        operation = self.server.build("doc", "kept", types_pb2.CARTRIDGE, **recipe())
        self.assertFalse(operation.HasField("error"), operation.error)
        before = self.ask(operation.cache)
        self.assertEqual(self.server.stop(), 0)
        self.server.start()
        self.assertEqual(self.ask(operation.cache), before)
        self.assertEqual(self.server.metric("stillhouse_cache_route_total", outcome="cold"), 1)
        self.assertGreaterEqual(self.server.metric("stillhouse_compression_ratio_count"), 1)

    def test_caches_that_left_come_back_from_host_memory(self):
        names = []
        for cache_id in ("one", "two"):
            operation = self.server.build("doc", cache_id, types_pb2.FULL)
            self.assertFalse(operation.HasField("error"), operation.error)
            names.append(operation.cache)
        expected = [self.ask(name) for name in names]
        both = self.server.metric("stillhouse_device_allocated_bytes", use="memories")
        self.assertEqual(self.server.stop(), 0)
        # Room for one of the two.
        self.server.start("--resident-memory", str(int(both * 0.75)), "--host-memory", "16MiB")
        for _ in range(2):
            for name, answers in zip(names, expected):
                self.assertEqual(self.ask(name), answers)
        route = lambda outcome: self.server.metric("stillhouse_cache_route_total", outcome=outcome)
        self.assertEqual(route("cold"), 2)
        self.assertEqual(route("warm"), 2)
        self.assertEqual(self.server.metric("stillhouse_cache_load_seconds_count", tier="host"), 2)
        self.assertEqual(self.server.metric("stillhouse_device_allocated_bytes", use="memories"), both / 2)

    def test_kill_in_the_middle_of_a_build_resumes_it(self):
        fields = recipe(training=caches_pb2.TrainingOptions(steps=150, rows_per_step=2, evaluate_every=50), seed=7)
        reference = self.server.build("doc", "reference", types_pb2.CARTRIDGE, **fields)
        self.assertFalse(reference.HasField("error"), reference.error)
        expected = self.ask(reference.cache)
        operation = self.server.build("doc", "killed", types_pb2.CARTRIDGE, wait=False, **fields)
        get = lambda: self.server.operations.GetOperation(operations_pb2.GetOperationRequest(name=operation.name))
        for fraction in (0.1, 0.5, 0.8):
            deadline = time.monotonic() + 60
            while get().metadata.fraction < fraction and not get().done and time.monotonic() < deadline:
                time.sleep(0.01)
            self.server.kill()
            self.server.start()
            with self.subTest(killed_at=fraction):
                self.assertTrue(get().done or get().metadata.fraction <= 1)
        done = self.server.wait(operation.name)
        self.assertFalse(done.HasField("error"), done.error)
        self.assertEqual(self.ask(done.cache), expected)

    def artifacts(self):
        return [p for p in glob.glob(self.server.store + "/**/*", recursive=True)
                if os.path.isfile(p) and open(p, "rb").read(4096).find(b"layer.0.k") >= 0]

    def test_a_corrupt_byte_in_a_stored_artifact(self):
        operation = self.server.build("doc", "damaged", types_pb2.FULL)
        self.server.stop()
        files = self.artifacts()
        self.assertEqual(len(files), 1, files)
        os.chmod(files[0], 0o600)
        with open(files[0], "r+b") as f:
            f.seek(-1000, os.SEEK_END)
            byte = f.read(1)
            f.seek(-1, os.SEEK_CUR)
            f.write(bytes([byte[0] ^ 0x40]))
        self.server.start()
        with self.assertRaises(grpc.RpcError) as caught:
            self.server.query("x", caches=[operation.cache])
        self.assertEqual(caught.exception.code(), CODE.DATA_LOSS, caught.exception.details())
        cache = self.server.caches.GetCache(caches_pb2.GetCacheRequest(name=operation.cache))
        self.assertEqual(cache.state, caches_pb2.Cache.QUARANTINED)
        self.assertEqual(self.server.metric("stillhouse_checksum_failures_total"), 1)
        self.assertEqual(len(self.server.query("still serving", max_tokens=2, ignore_eos=True).ids), 2)

    def test_an_artifact_of_another_model_is_refused(self):
        operation = self.server.build("doc", "foreign", types_pb2.FULL)
        self.server.stop()
        from harness import tiny_model
        self.server.model = tiny_model(self.folder, seed=2)
        self.server.start()
        with self.assertRaises(grpc.RpcError) as caught:
            self.server.query("x", caches=[operation.cache])
        self.assertEqual(caught.exception.code(), CODE.FAILED_PRECONDITION, caught.exception.details())
        self.assertIn("model", caught.exception.details())
