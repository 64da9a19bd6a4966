"""Keys and tenants: who may see what, and where a server may listen."""
import os
import shutil
import subprocess
import tempfile
import unittest

import grpc
from harness import BUILD, DOCUMENT, Server, ServerCase, tiny_model, upload_messages
from stillhouse.v1 import caches_pb2, corpora_pb2, inference_pb2, server_pb2, tenants_pb2, types_pb2

CODE = grpc.StatusCode
ADMIN = "a" * 40


class Keys(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="stillhouse-e2e-")
        key_file = os.path.join(cls.folder, "admin.key")
        with open(key_file, "w") as f:
            f.write(ADMIN + "\n")
        os.chmod(key_file, 0o600)
        cls.server = Server(cls.folder, "--admin-key-file", key_file)
        cls.keys = {}
        for tenant in ("ada", "bob"):
            cls.server.tenants.CreateTenant(tenants_pb2.CreateTenantRequest(tenant_id=tenant), metadata=cls.bearer(ADMIN))
            key = cls.server.tenants.CreateKey(tenants_pb2.CreateKeyRequest(parent=f"tenants/{tenant}"), metadata=cls.bearer(ADMIN))
            cls.keys[tenant] = key

    @classmethod
    def tearDownClass(cls):
        cls.server.kill()
        shutil.rmtree(cls.folder, ignore_errors=True)

    @staticmethod
    def bearer(secret):
        return (("authorization", f"Bearer {secret}"),)

    def of(self, tenant):
        return self.bearer(self.keys[tenant].secret)

    def code(self, call, *args, **kwargs):
        with self.assertRaises(grpc.RpcError) as caught:
            call(*args, **kwargs)
        return caught.exception

    def test_no_key_and_wrong_keys(self):
        listing = corpora_pb2.ListCorporaRequest()
        self.assertEqual(self.code(self.server.corpora.ListCorpora, listing).code(), CODE.UNAUTHENTICATED)
        for secret in ("", "nonsense", ADMIN[:-1], self.keys["ada"].secret[:-1] + "!", "x" * 10000):
            error = self.code(self.server.corpora.ListCorpora, listing, metadata=self.bearer(secret))
            self.assertEqual(error.code(), CODE.UNAUTHENTICATED)
            if len(secret) > 4:
                self.assertNotIn(secret, error.details())

    def test_another_tenants_names_do_not_exist(self):
        self.server.corpora.UploadCorpus(upload_messages("secret", DOCUMENT), metadata=self.of("ada"), timeout=30)
        mine = corpora_pb2.GetCorpusRequest(name="tenants/ada/corpora/secret")
        self.assertEqual(self.server.corpora.GetCorpus(mine, metadata=self.of("ada")).size_bytes, len(DOCUMENT))
        theirs = self.code(self.server.corpora.GetCorpus, mine, metadata=self.of("bob"))
        missing = self.code(self.server.corpora.GetCorpus, corpora_pb2.GetCorpusRequest(name="tenants/ada/corpora/absent"),
                            metadata=self.of("bob"))
        self.assertEqual(theirs.code(), CODE.NOT_FOUND)
        self.assertEqual(theirs.details().replace("secret", "X"), missing.details().replace("absent", "X"))
        self.assertEqual(len(self.server.corpora.ListCorpora(corpora_pb2.ListCorporaRequest(), metadata=self.of("bob")).corpora), 0)
        query = inference_pb2.QueryRequest(prompt="x", caches=["tenants/ada/corpora/secret/caches/c"])
        self.assertEqual(self.code(lambda: list(self.server.inference.Query(query, metadata=self.of("bob")))).code(), CODE.NOT_FOUND)
        self.assertEqual(self.code(self.server.caches.ListCaches, caches_pb2.ListCachesRequest(parent="tenants/ada/corpora/-"),
                                   metadata=self.of("bob")).code(), CODE.NOT_FOUND)

    def test_only_the_admin_makes_tenants(self):
        error = self.code(self.server.tenants.CreateTenant, tenants_pb2.CreateTenantRequest(tenant_id="eve"), metadata=self.of("ada"))
        self.assertIn(error.code(), (CODE.PERMISSION_DENIED, CODE.UNAUTHENTICATED))
        again = self.code(self.server.tenants.CreateTenant, tenants_pb2.CreateTenantRequest(tenant_id="ada"), metadata=self.bearer(ADMIN))
        self.assertEqual(again.code(), CODE.ALREADY_EXISTS)

    def test_a_deleted_key_stops_at_once_and_secrets_are_shown_once(self):
        key = self.server.tenants.CreateKey(tenants_pb2.CreateKeyRequest(parent="tenants/bob"), metadata=self.bearer(ADMIN))
        use = lambda: self.server.corpora.ListCorpora(corpora_pb2.ListCorporaRequest(), metadata=self.bearer(key.secret))
        use()
        listed = self.server.tenants.ListKeys(tenants_pb2.ListKeysRequest(parent="tenants/bob"), metadata=self.bearer(ADMIN)).keys
        self.assertTrue(all(not k.secret for k in listed))
        self.server.tenants.DeleteKey(tenants_pb2.DeleteKeyRequest(name=key.name), metadata=self.bearer(ADMIN))
        self.assertEqual(self.code(use).code(), CODE.UNAUTHENTICATED)
        # Nothing on disk holds the secret.
        for folder, _, files in os.walk(self.server.store):
            for name in files:
                with open(os.path.join(folder, name), "rb") as f:
                    self.assertNotIn(key.secret.encode(), f.read())

    def test_keys_survive_a_restart(self):
        self.server.stop()
        self.server.start()
        self.server.corpora.ListCorpora(corpora_pb2.ListCorporaRequest(), metadata=self.of("ada"))


class Quotas(ServerCase):
    TEXT = DOCUMENT[:300]
    FLAGS = ("--max-stored-corpora", str(2 * len(TEXT)), "--max-stored-caches", "1MiB", "--requests-per-minute", "2",
             "--tokens-per-minute", "1000000")

    def test_bytes_and_requests(self):
        server = self.server
        server.upload("one", self.TEXT)
        server.upload("two", self.TEXT)
        with self.assert_code(CODE.RESOURCE_EXHAUSTED) as caught:
            server.upload("three", self.TEXT)
        self.assertEqual(self.reason(caught), "TOO_MANY_CORPORA_BYTES")
        server.upload("one", self.TEXT)  # it is there
        server.corpora.DeleteCorpus(corpora_pb2.DeleteCorpusRequest(name="tenants/default/corpora/two"))
        server.upload("three", self.TEXT)

        full = lambda cache_id: server.build("one", cache_id, method=types_pb2.FULL,
                                             evaluation=caches_pb2.EvaluationOptions(skip=True))
        stored, done = 0, full("k0")
        self.assertFalse(done.HasField("error"), done.error.message)
        while not done.HasField("error"):
            stored += 1
            self.assertLess(stored, 100)
            done = full(f"k{stored}")
        self.assertEqual(done.error.code, CODE.RESOURCE_EXHAUSTED.value[0])
        self.assertIn("caches", done.error.message)
        caches = server.caches.ListCaches(caches_pb2.ListCachesRequest(parent="tenants/default/corpora/one")).caches
        self.assertEqual(len(caches), stored)
        self.assertLessEqual(sum(c.artifact_bytes for c in caches), 1 << 20)
        server.caches.DeleteCache(caches_pb2.DeleteCacheRequest(name=caches[0].name))
        self.assertFalse(full("again").HasField("error"))

        for _ in range(2):
            server.query("q", max_tokens=1)
        with self.assert_code(CODE.RESOURCE_EXHAUSTED) as caught:
            server.query("q", max_tokens=1)
        self.assertEqual(self.reason(caught), "REQUESTS_PER_MINUTE")
        self.assertEqual(server.metric("stillhouse_admission_rejections_total", reason="quota"), 2)


class Listening(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="stillhouse-e2e-")
        self.model = tiny_model(self.folder)

    def tearDown(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    def run_server(self, *flags):
        return subprocess.run([f"{BUILD}/bin/stillhouse-server", "--model", self.model, "--store", self.folder + "/s",
                               "--metrics-address", "", *flags], capture_output=True, text=True, timeout=60)

    def test_off_loopback_without_keys_or_tls_is_refused(self):
        result = self.run_server("--address", "0.0.0.0:0")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("loopback", result.stderr)

    def test_unreadable_models_are_refused_with_one_sentence(self):
        for content in (b"", b"GGUF", b"not a model" * 100, b"GGUF\x03\x00\x00\x00" + b"\xff" * 64):
            self.model = os.path.join(self.folder, "bad.gguf")
            with open(self.model, "wb") as f:
                f.write(content)
            result = self.run_server("--address", "127.0.0.1:0")
            self.assertEqual(result.returncode, 1)
            self.assertEqual(len(result.stderr.strip().splitlines()), 1, result.stderr)

    def test_flags_come_from_a_file_and_a_mistyped_one_is_refused(self):
        path = os.path.join(self.folder, "server.toml")
        for line, code, words in (('address = "0.0.0.0:0"', 1, "loopback"), ('admin-key-fille = "k"', None, "admin-key-fille")):
            with open(path, "w") as f:
                f.write("# flags\n" + line + "\n")
            result = self.run_server("--config", path)
            self.assertNotEqual(result.returncode, 0)
            if code:
                self.assertEqual(result.returncode, code)
            self.assertIn(words, result.stderr)

    def test_a_certificate_without_its_key_is_refused(self):
        cert = self.folder + "/cert.pem"
        with open(cert, "w") as f:
            f.write("a certificate")
        result = self.run_server("--address", "127.0.0.1:0", "--tls-cert", cert)
        self.assertEqual(result.returncode, 1)
        self.assertIn("--tls-key", result.stderr)

    def test_mutual_tls_lets_in_who_has_a_certificate_of_the_authority(self):
        def make(name, *more):
            key, cert = f"{self.folder}/{name}.key", f"{self.folder}/{name}.pem"
            subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
                            "-subj", f"/CN={name}", *more], check=True, capture_output=True)
            return key, cert
        key, cert = make("localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
        good, other = make("good"), make("other")
        server = Server(self.folder, "--tls-cert", cert, "--tls-key", key, "--tls-client-ca", good[1], model=self.model)

        def read(path):
            with open(path, "rb") as f:
                return f.read()
        try:
            for pair, welcome in ((good, True), (other, False), (None, False)):
                server.channel.close()
                server.channel = grpc.secure_channel(server.address, grpc.ssl_channel_credentials(
                    read(cert), *(map(read, pair) if pair else ())))
                server.stubs(server.channel)
                if welcome:
                    self.assertTrue(server.info.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=10).version)
                else:
                    with self.assertRaises(grpc.RpcError):
                        server.info.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=5)
        finally:
            server.kill()

    def test_tls(self):
        key, cert = self.folder + "/key.pem", self.folder + "/cert.pem"
        subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2", "-subj",
                        "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"], check=True, capture_output=True)
        server = Server(self.folder, "--tls-cert", cert, "--tls-key", key, model=self.model)
        try:
            with self.assertRaises(grpc.RpcError):
                server.info.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=5)
            with open(cert, "rb") as f:
                credentials = grpc.ssl_channel_credentials(f.read())
            server.channel.close()
            server.channel = grpc.secure_channel(server.address, credentials)
            server.stubs(server.channel)
            self.assertTrue(server.info.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=10).version)
        finally:
            server.kill()
