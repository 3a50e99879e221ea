"""Middleware: API keys, hosts, origins, logs and metrics; and the explorer page behind it."""

from __future__ import annotations

import hmac
import json
from base64 import b64encode

import pytest

from keepleft.serving.engine.request import Tenant
from keepleft.serving.explorer.explorer import Explorer
from keepleft.serving.http.middleware.allowed_hosts import allowed_hosts
from keepleft.serving.http.middleware.auth import PUBLIC_PATHS, APIKey, APIKeys, read_key_file
from keepleft.serving.http.middleware.request_log import MAX_METHOD_LENGTH
from keepleft.serving.http.routes.explorer import PAGE_HEADERS
from serving.tiny_services import Slow, client, decoder

pytestmark = pytest.mark.usefixtures("one_thread")
KEYS = APIKeys(["first-key", "second-key"])
BODY = {"prompt": "the sea", "max_tokens": 3, "seed": 1}


def with_key(key):
    return {"authorization": f"Bearer {key}"}


def every_route(http_client):
    return [
        (method.upper(), path.replace("{model}", "tiny").replace("{question}", "about"))
        for path, methods in http_client.app.openapi()["paths"].items()
        for method in methods
    ]


def as_password(key):
    return {"authorization": "Basic " + b64encode(f"anybody:{key}".encode()).decode()}


def test_every_route_but_health_requires_a_key():
    with client(decoder(), keys=KEYS) as http_client:
        routes = every_route(http_client)
        assert len(routes) >= 12
        files = [
            ("GET", path)
            for path in ("/", "/explore/", "/explore/explorer.js", "/explore/explorer.css", "/explore/x")
        ]
        for method, path in [
            *routes,
            *files,
            ("GET", "/openapi.json"),
            ("GET", "/nowhere"),
            ("POST", "/health/x"),
        ]:
            for headers in (
                {},
                with_key("wrong"),
                with_key(""),
                with_key("first-key "[:-2]),
                {"authorization": "first-key"},
                {"authorization": "Basic first-key"},
                {"authorization": "Bearer"},
                {"x-api-key": "first-key"},
                as_password("wrong"),
            ):
                answer = http_client.request(method, path, headers=headers)
                if path in PUBLIC_PATHS:
                    assert answer.status_code == 200
                else:
                    assert answer.status_code == 401, (path, headers)
                    assert answer.json()["error"]["code"] == "invalid_api_key"
                    how = "Basic" if path == "/" or path.startswith("/explore/") else "Bearer"
                    assert answer.headers["www-authenticate"].split()[0] == how
        for key in ("first-key", "second-key"):
            assert http_client.get("/v1/models", headers=with_key(key)).status_code == 200
            assert http_client.post("/v1/completions", json=BODY, headers=with_key(key)).status_code == 200
        document = http_client.get("/openapi.json", headers=with_key("first-key")).json()
        assert document["paths"]["/v1/completions"]["post"]["security"] == [{"key": []}]


def test_a_browser_sends_the_key_as_a_password_and_for_the_page_alone():
    with client(decoder(), keys=KEYS, explorer=Answers()) as http_client:
        other = as_password("second-key")
        for headers in (
            with_key("first-key"),
            as_password("first-key"),
            {**other, "sec-fetch-site": "none"},
            {**other, "sec-fetch-site": "same-origin"},
        ):
            assert http_client.get("/", headers=headers, follow_redirects=False).status_code == 307
            assert http_client.post("/explore/model_info", json={}, headers=headers).status_code == 200
        for site in (
            "cross-site",
            "same-site",
            "nonsense",
        ):  # what a browser sends by itself counts only where the page asks
            answer = http_client.post(
                "/explore/model_info", json={}, headers={**as_password("first-key"), "sec-fetch-site": site}
            )
            assert answer.status_code == 401
        assert http_client.get("/v1/models", headers=as_password("first-key")).status_code == 401
        for nonsense in ("Basic", "Basic !", "Basic " + b64encode(b"first-key").decode(), "Basic " + "A" * 5):
            assert http_client.get("/", headers={"authorization": nonsense}).status_code == 401


def test_all_keys_are_compared_whichever_is_right(monkeypatch):
    seen = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: seen.append((len(a), len(b))) or a == b)
    for header in (b"Bearer first-key", b"Bearer second-key", b"Bearer wrong", b"", None):
        seen.clear()
        KEYS.tenant(header)
        assert seen == [(32, 32)] * 2


def test_a_key_is_a_tenant_and_a_user_is_inside_it():
    tenants = []
    with client(decoder(), keys=KEYS) as http_client:
        submit = http_client.service.engine_thread.submit
        http_client.service.engine_thread.submit = lambda request, listener: (
            tenants.append(request.tenant) or submit(request, listener)
        )
        for key, user in (
            ("first", None),
            ("second", None),
            ("first", "ann"),
            ("first", "bob"),
            ("first", "ann"),
        ):
            http_client.post("/v1/completions", json={**BODY, "user": user}, headers=with_key(f"{key}-key"))
    assert len(set(tenants)) == 4
    assert tenants[2] == tenants[4]
    assert not any("key" in tenant for tenant in tenants)


@pytest.mark.parametrize("key", ["", " a", "a\n", "schlüssel", "a\tb"])
def test_a_key_that_no_header_can_carry_is_refused(key):
    with pytest.raises(ValueError, match="an API key is empty, or has characters"):
        APIKeys([key])


@pytest.mark.parametrize(
    ("host", "fine"),
    [
        ("localhost", True),
        ("localhost:8000", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("[::1]", True),
        ("LOCALHOST", True),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:80", False),
        ("", False),
    ],
)
def test_loopback_addresses_reject_other_hosts(host, fine):
    with client(decoder(), allowed_hosts=allowed_hosts("127.0.0.1")) as http_client:
        answer = http_client.get("/v1/models", headers={"host": host})
        assert answer.status_code == (200 if fine else 421)
        assert fine or answer.json()["error"]["code"] == "wrong_host"
        for path in PUBLIC_PATHS:
            assert http_client.get(path, headers={"host": host}).status_code == 200


def test_other_addresses_accept_any_host():
    assert allowed_hosts("0.0.0.0") is None
    assert allowed_hosts("192.168.1.5") is None
    assert allowed_hosts("127.0.0.5") == {"127.0.0.1", "localhost", "::1", "127.0.0.5"}
    with client(decoder(), allowed_hosts=allowed_hosts("0.0.0.0")) as http_client:
        assert http_client.get("/v1/models", headers={"host": "models.example"}).status_code == 200


def test_other_origins_are_rejected_unless_allowed():
    from_page = {"origin": "https://page.example"}
    ahead = {
        **from_page,
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type,authorization",
    }
    with client(decoder()) as http_client:
        assert "access-control-allow-origin" not in http_client.get("/v1/models", headers=from_page).headers
        assert http_client.options("/v1/completions", headers=ahead).status_code == 405
    with client(decoder(), keys=KEYS, allowed_origins=["https://page.example"]) as http_client:
        answer = http_client.options("/v1/completions", headers=ahead)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        assert (
            http_client.get("/v1/models", headers=from_page).headers["access-control-allow-origin"]
            == "https://page.example"
        )
        assert (
            http_client.options(
                "/v1/completions", headers={**ahead, "origin": "https://evil.example"}
            ).status_code
            == 400
        )


# the page ---------------------------------------------------------------------------------------


def test_the_page_is_served_strictly(tmp_path):
    for name, text in (
        ("index.html", "<!doctype html>"),
        ("explorer.js", "1"),
        ("explorer.css", "a{}"),
        ("secret.txt", "no"),
    ):
        (tmp_path / name).write_text(text)
    with client(decoder(), page_folder=tmp_path, keys=KEYS) as http_client:
        http_client.headers.update(with_key("first-key"))
        answer = http_client.get("/")
        assert answer.url.path == "/explore/"
        assert answer.text == "<!doctype html>"
        for name, kind in (
            ("", "text/html"),
            ("explorer.js", "text/javascript"),
            ("explorer.css", "text/css"),
        ):
            answer = http_client.get(f"/explore/{name}")
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(kind)
            assert answer.headers["content-security-policy"] == PAGE_HEADERS["content-security-policy"]
            assert "unsafe" not in answer.headers["content-security-policy"]
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
        for path in (
            "/explore/secret.txt",
            "/explore/..%2fsecret.txt",
            "/explore/../secret.txt",
            "/explore/index.html",
        ):
            assert http_client.get(path).status_code in (404, 405)


def test_a_page_that_is_not_built_says_how_to_build_it(tmp_path):
    with client(decoder(), page_folder=tmp_path) as http_client:
        answer = http_client.get("/")
        assert answer.status_code == 404
        assert answer.text.count("\n") == 1
        assert "make page" in answer.text


class Answers:
    """Stands in for the explorer."""

    def ask(self, question, params, tenant):
        import threading

        class ExpiredError(ValueError):
            code = "expired"

        ExpiredError.__module__ = "keepleft.serving.explorer.params"
        if question == "key":
            raise ExpiredError("it has expired")
        if question == "wrong":
            raise ValueError("there is no question 'wrong'")
        return {"question": question, "params": params, "thread": threading.current_thread().name}


def test_questions_are_answered_in_a_thread_beside_the_engine():
    with client(decoder(), explorer=Answers()) as http_client:
        answer = http_client.post("/explore/model_info", json={"a": [1]}).json()
        assert answer == {"question": "model_info", "params": {"a": [1]}, "thread": "keepleft explorer"}
        answer = http_client.post("/explore/key", json={})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "expired"
        assert (
            http_client.post("/explore/wrong", json={}).json()["error"]["message"]
            == "there is no question 'wrong'"
        )
        assert http_client.post("/explore/model_info", json=[1]).status_code == 400
    with client(decoder()) as http_client:
        assert http_client.post("/explore/model_info", json={}).status_code == 404


def test_the_texts_of_the_explorer_belong_to_their_key():
    explorer = Explorer(*decoder(), name="tiny")
    with client(decoder(), explorer=explorer, keys=APIKeys(["a-key", "b-key"])) as http_client:

        def ask(api_key, question, **params):
            headers = {"authorization": f"Bearer {api_key}"}
            return http_client.post(f"/explore/{question}", json=params, headers=headers)

        text = {"key": ask("a-key", "attention", text="a secret").json()["key"], "name": "decoder.self"}
        view = {**text, "layer": 0, "head": 0, "size": 8}
        assert ask("a-key", "overview", **view).status_code == 200
        refused = ask("b-key", "overview", **view)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "expired")
        for n in range(8):
            assert ask("b-key", "attention", text=f"filler {n}").status_code == 200
        assert ask("a-key", "overview", **view).status_code == 200


def test_all_work_for_an_attention_map_is_its_tenants():
    keys = APIKeys(["a-key"])
    tenants = []
    with client(decoder(), keys=keys) as http_client:
        run = http_client.service.preparation.run

        def note_tenant(tenant, work):
            tenants.append(tenant)
            return run(tenant, work)

        http_client.service.preparation.run = note_tenant
        headers = {"authorization": "Bearer a-key"}
        assert http_client.post("/v1/attention", json={"input": "a"}, headers=headers).status_code == 200
    assert set(tenants) == {Tenant(*keys.weights)}
    assert len(tenants) == 2


# logs and metrics ----------------------------------------------------------------------------------


def test_a_request_is_a_log_line_without_its_content():
    lines = []
    with client(
        decoder(), keys=KEYS, log=lambda level, fields: lines.append({"level": level, **fields})
    ) as http_client:
        answer = http_client.post(
            "/v1/completions",
            json={**BODY, "prompt": "the secret sea", "user": "ann@example.org"},
            headers=with_key("first-key"),
        )
        http_client.get("/v1/models?prompt=the+secret")
        http_client.get("/health")
    line = lines[0]
    assert line["id"] == answer.headers["x-request-id"]
    assert (line["method"], line["route"], line["status"], line["level"]) == (
        "POST",
        "/v1/completions",
        200,
        "info",
    )
    assert line["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert line["completion_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert 0 < line["ttft_ms"] <= line["ms"]
    assert len(line["tenant"]) == 8
    assert (lines[1]["status"], lines[1]["tenant"], lines[2]["level"]) == (401, None, "debug")
    log_text = json.dumps(lines)
    for word in ("secret", "key", "ann", answer.json()["choices"][0]["text"] or "key"):
        assert word not in log_text


def test_a_method_is_not_logged_at_length():
    lines = []
    with client(decoder(), keys=KEYS, log=lambda level, fields: lines.append(fields)) as http_client:
        assert http_client.request("M" * 9000, "/v1/models").status_code == 401
    assert lines[0]["method"] == "M" * MAX_METHOD_LENGTH


def test_two_authorization_headers_are_refused():
    with client(decoder(), keys=KEYS) as http_client:
        for keys in (("wrong", "first-key"), ("first-key", "wrong"), ("first-key", "first-key")):
            headers = [("authorization", f"Bearer {key}") for key in keys]
            answer = http_client.get("/v1/models", headers=headers)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "duplicate_authorization"


def test_prometheus_metrics():
    with client(decoder(), Slow) as http_client:
        usage = http_client.post("/v1/completions", json={**BODY, "max_tokens": 4}).json()["usage"]
        http_client.post("/v1/completions", json={"prompt": []})
        http_client.get("/nowhere/at/all")
        answer = http_client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    metrics = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    assert metrics['keepleft_requests_total{route="/v1/completions",status="200"}'] == "1.0"
    assert metrics['keepleft_requests_total{route="/v1/completions",status="400"}'] == "1.0"
    assert metrics['keepleft_requests_total{route="other",status="404"}'] == "1.0"
    assert float(metrics["keepleft_prompt_tokens_total"]) == usage["prompt_tokens"]
    assert float(metrics["keepleft_generation_tokens_total"]) == usage["completion_tokens"]
    for name in ("queue_seconds", "time_to_first_token_seconds", "time_per_output_token_seconds"):
        assert metrics[f"keepleft_{name}_count"] == "1.0", name
    for name in ("running", "waiting", "in_flight"):
        assert float(metrics[f"keepleft_engine_{name}"]) == 0


def test_a_key_file_has_weights_and_operators(tmp_path):
    file = tmp_path / "keys.txt"
    file.write_text("# keys of the team\n\none-key\n  two-key   weight=2.5\nthree-key operator weight=4\n")
    keys = APIKeys(read_key_file(str(file)))
    tenants = [keys.tenant(f"Bearer {name}-key".encode()) for name in ("one", "two", "three")]
    assert [keys.weights[tenant] for tenant in tenants] == [1.0, 2.5, 4.0]
    assert [keys.is_operator(tenant) for tenant in tenants] == [False, False, True]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("# none\n", "holds no API key"),
        ("a-secret wieght=2\n", "line 1 of .*: 'wieght=2' stands behind the key"),
        ("a-secret\n\na-secret weight=2\n", "line 3 of .*: this API key was given before"),
        ("a-secret name=b\nb-secret name=b\n", "line 2 of .*: the name 'b' was given to another"),
        ("a-secret name=b/c\n", "line 1 of .*: the name of an API key is 'b/c'"),
        ("a-secret weight=two\n", "'weight=two'"),
        ("a-secret weight=0\n", "line 1 of .* must be above 0"),
    ],
)
def test_a_key_file_that_says_nothing_sensible_is_named(tmp_path, content, message):
    file = tmp_path / "keys.txt"
    file.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_key_file(str(file))
    assert "a-secret" not in str(caught.value)


def test_the_operator_sees_all_metrics_and_others_their_own():
    first_key = APIKey("first-key", name="team-a")
    second_key = APIKey("second-key")
    keys = APIKeys([first_key, second_key, APIKey("the-operator", operator=True)])
    with client(decoder(), keys=keys) as http_client:
        bearer = lambda key: {"authorization": f"Bearer {key}"}
        for count, key in ((2, "first-key"), (1, "second-key")):
            for _ in range(count):
                body = {"prompt": "the sea", "max_tokens": 3, "temperature": 0}
                assert http_client.post("/v1/completions", json=body, headers=bearer(key)).status_code == 200
        own = http_client.get("/metrics", headers=bearer("first-key")).text
        assert "keepleft_key_requests_total 2.0" in own
        assert "keepleft_engine" not in own
        assert (
            "keepleft_key_requests_total 1.0"
            in http_client.get("/metrics", headers=bearer("second-key")).text
        )
        everything = http_client.get("/metrics", headers=bearer("the-operator")).text
        assert 'keepleft_requests_total{route="/v1/completions",status="200"} 3.0' in everything
        assert "keepleft_engine_in_flight" in everything
        assert 'keepleft_key_requests_total{key="team-a"} 2.0' in everything
        assert f'keepleft_key_requests_total{{key="{second_key.tenant[:8]}"}} 1.0' in everything
        assert "keepleft_key_requests_created" not in own + everything
