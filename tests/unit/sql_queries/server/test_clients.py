"""Clients that others wrote ask the server: psycopg, psql, and the JDBC driver."""

import base64
import json
import shutil
import struct
import subprocess
import threading
import time
from contextlib import ExitStack
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
from tests.sql_model import (
    DIFFERENCES,
    EVERY_KIND,
    draw_clicks,
    run_job,
    sql_app,
    write_clicks,
    write_every_kind,
)

from millstream.access.tls import certificate_of
from millstream.access.tokens import TokenFile
from millstream.errors import ConfigError, EnvironmentProblem
from millstream.sql_queries.query import scope_of
from millstream.sql_queries.server.login import LoginRules
from millstream.sql_queries.server.server import read_password, serve_sql
from millstream.sql_queries.session import SqlLimits
from millstream.testing.maven import JavaProgram

LIMITS = SqlLimits(seconds=300, memory_mb=256, threads=1)
PASSWORD = "a long password, é"
DRIVER = JavaProgram(
    "the JDBC driver of PostgreSQL", "pgjdbc-42.7.7", ("org.postgresql:postgresql:42.7.7",)
)
CLICKS = {0: [b'{"ad":1,"user":"ann","at":"2026-01-01T00:00:00Z","cost":2}'] * 250}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    write_every_kind(folder)
    write_clicks(folder, CLICKS, 1)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with serve_sql(scope_of(None, folder), "127.0.0.1:0", limits=LIMITS) as serving:
        yield serving


@pytest.fixture
def connection(server):
    with psycopg.connect(server.url, autocommit=True) as connection:
        yield connection


def one(connection, statement, *values, binary=False):
    return connection.execute(statement, values or None, binary=binary).fetchone()


@pytest.mark.parametrize("binary", [False, True])
def test_every_kind_of_a_view_comes_whole_as_text_and_in_binary_form(connection, binary):
    found = connection.execute("SELECT * FROM kinds ORDER BY id", binary=binary).fetchall()
    expected = EVERY_KIND.with_columns(nested=EVERY_KIND["nested"]).rows()
    for row, wanted in zip(found, expected, strict=True):
        for value, other in zip(row, wanted, strict=True):
            assert value == other or (value != value and other != other)


VALUES = [
    0,
    -(2**63),
    True,
    1.5,
    float("inf"),
    Decimal("-12345678901234567890.000000001"),
    "it's \\ \" ; -- /* $1 é😀\n",
    b"\x00'\xff",
    date(1, 1, 1),
    datetime(2026, 3, 29, 1, 30, 0, 123456, tzinfo=UTC),
    datetime(2026, 3, 29, 1, 30),  # noqa: DTZ001 - without a zone, as some values are
    timedelta(days=-3, microseconds=7),
    UUID("00112233-4455-6677-8899-aabbccddeeff"),
    [1, None, 3],
    ["a,b", '"', "\\", None, "NULL", ""],
    [],
]


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_of_statements_come_back(connection, value, binary):
    cast = {float: "::DOUBLE", str: "::VARCHAR", bytes: "::BLOB", list: ""}.get(type(value), "")
    if isinstance(value, list):
        cast = "::VARCHAR[]" if "" in value else "::BIGINT[]"
    place = "%b" if binary and not isinstance(value, list) else "%s"
    found = one(connection, f"SELECT {place}{cast}", value, binary=binary)[0]
    assert found == value


def test_values_whose_type_is_open_are_what_they_are_compared_with(connection):
    assert one(connection, "SELECT count(*) FROM kinds WHERE id = %s", "2") == (1,)
    assert one(connection, "SELECT count(*) FROM kinds WHERE id = ANY(%s)", [1, 3, 7]) == (2,)
    assert one(connection, "SELECT count(*) FROM kinds WHERE text = ANY(%s)", ["", "x"]) == (1,)
    assert one(
        connection, "SELECT count(*) FROM kinds WHERE moment < %s", "1970-01-01 00:00:00+00"
    ) == (1,)
    assert one(
        connection, "SELECT count(*) FROM kinds WHERE text = %s", "'; DROP VIEW kinds --"
    ) == (0,)


INFINITE = [
    ("DATE", "!i", 2**31 - 1),
    ("TIMESTAMP", "!q", 2**63 - 1),
    ("TIMESTAMP_NS", "!q", 2**63 - 1),
    ("TIMESTAMP_S", "!q", 2**63 - 1),
    ("TIMESTAMPTZ", "!q", 2**63 - 1),
]


@pytest.mark.parametrize(("kind", "layout", "largest"), INFINITE)
def test_infinite_times_are_as_postgresql_has_them(server, kind, layout, largest):
    select = (
        f"SELECT x, -y, [x, NULL, z] FROM (SELECT 'infinity'::{kind} x, 1 y, '-infinity'::{kind} z)"
    )
    with psycopg.connect(server.url, autocommit=True) as connection:
        found = connection.pgconn.exec_params(select.encode(), None, result_format=1)
        assert found.error_message == b""
        assert found.get_value(0, 0) == struct.pack(layout, largest)
        size = struct.calcsize(layout)
        first, last = (
            struct.pack(f"!i{layout[1]}", size, value) for value in (largest, -largest - 1)
        )
        assert found.get_value(0, 2)[20:] == first + b"\xff\xff\xff\xff" + last
        text = connection.pgconn.exec_params(select.encode(), None)
        assert text.get_value(0, 0) == b"infinity"
        assert text.get_value(0, 2) == b'{"infinity",NULL,"-infinity"}'
        alone = f"SELECT '-infinity'::{kind}".encode()
        found = connection.pgconn.exec_params(alone, None, result_format=1)
        assert found.get_value(0, 0) == struct.pack(layout, -largest - 1)


@pytest.mark.parametrize(
    ("oid", "layout", "largest"),
    [(1082, "!i", 2**31 - 1), (1114, "!q", 2**63 - 1), (1184, "!q", 2**63 - 1)],
)
def test_infinite_times_are_taken_in_binary_form(connection, oid, layout, largest):
    for value, text in ((largest, b"infinity"), (-largest - 1, b"-infinity")):
        given = [struct.pack(layout, value)]
        found = connection.pgconn.exec_params(b"SELECT $1", given, [oid], [1])
        assert found.get_value(0, 0) == text


def test_dates_before_those_of_the_binary_form_are_refused_and_the_connection_goes_on(connection):
    earliest = "SELECT '5877642-06-26 (BC)'::DATE"
    with pytest.raises(psycopg.errors.DatetimeFieldOverflow, match="VARCHAR"):
        connection.execute(earliest, binary=True)
    found = connection.pgconn.exec_params(earliest.encode(), None)
    assert found.get_value(0, 0) == b"5877642-06-26 BC"


def test_a_timeout_of_statements_is_kept(server):
    endless = (
        "SELECT count(*) FROM range(10000000) a, range(10000000) b WHERE a.range * b.range = -1"
    )
    with psycopg.connect(server.url) as connection:
        connection.execute("SET LOCAL statement_timeout = '0.2s'")
        with pytest.raises(psycopg.errors.QueryCanceled, match=r"0\.2 s"):
            connection.execute(endless)
        connection.rollback()
        assert one(connection, "SHOW statement_timeout") == ("0",)
        connection.execute("SET statement_timeout = 300")
        connection.commit()
        with pytest.raises(psycopg.errors.QueryCanceled, match=r"0\.3 s"):
            connection.execute(endless)
        connection.rollback()
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="'soon'"):
            connection.execute("SET statement_timeout = soon")
        connection.rollback()
        connection.execute("RESET statement_timeout")
        assert one(connection, "SHOW statement_timeout") == ("0",)


def test_a_position_that_is_none_cannot_be_set(connection):
    for wrong in ('{"clicks": {"0": "17"}}', '{"clicks": 17}', "null", "[]", "17", "{"):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="Give a position as JSON"):
            connection.execute(f"SET millstream.at_least = '{wrong}'")
    assert one(connection, "SELECT 1") == (1,)


def test_the_position_of_the_last_statement_is_told(connection):
    assert one(connection, "SELECT count(*) FROM topics.clicks") == (250,)
    told = json.loads(connection.info.parameter_status("millstream.position"))
    assert told == {"clicks": {"0": 250}}
    assert json.loads(one(connection, "SHOW millstream.position")[0]) == told


def test_errors_have_codes_and_end_nothing_but_their_transaction(server):
    with psycopg.connect(server.url) as connection:
        with pytest.raises(psycopg.errors.UndefinedTable, match=r'There are: views."kinds"'):
            connection.execute("SELECT * FROM nothing")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            connection.execute("SELECT 1")
        connection.rollback()
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            connection.execute("DELETE FROM kinds")
        connection.rollback()
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="READ COMMITTED"):
            connection.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        connection.rollback()
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="UTC"):
            connection.execute("SET TIME ZONE 'Europe/Berlin'")
        connection.rollback()
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_cursors_of_the_server_are_fetched_in_parts(server):
    with psycopg.connect(server.url) as connection, connection.cursor(name="part") as cursor:
        cursor.itersize = 7
        cursor.execute("SELECT _offset FROM clicks WHERE _offset >= %s ORDER BY 1", (3,))
        assert [offset for (offset,) in cursor] == list(range(3, 250))


def test_a_statement_is_cancelled_and_the_session_goes_on(server):
    with psycopg.connect(server.url, autocommit=True) as connection:
        timer = threading.Timer(0.5, connection.cancel_safe)
        timer.start()
        with pytest.raises(psycopg.errors.QueryCanceled):
            connection.execute(
                "SELECT count(*) FROM range(10000000) a, range(10000000) b WHERE a.range * b.range = -1"
            )
        timer.join()
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_pipeline_of_statements_goes_on_after_an_error(connection):
    with connection.pipeline() as pipeline:
        first = connection.execute("SELECT %s::INT", (1,))
        pipeline.sync()
        with pytest.raises(psycopg.errors.UndefinedTable):
            connection.execute("SELECT * FROM nothing").fetchall()
        pipeline.sync()
        last = connection.execute("SELECT %s::INT", (2,))
    assert (first.fetchone(), last.fetchone()) == ((1,), (2,))


def test_a_database_that_is_not_the_app_is_refused_with_the_name_of_the_app(server):
    with pytest.raises(psycopg.OperationalError, match="there is 'kinds'"):
        psycopg.connect(server.url.replace("/kinds", "/postgres"))


def test_a_password_is_asked_for_and_connections_are_counted(folder, tmp_path):
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    password = read_password(file)
    with serve_sql(
        scope_of(None, folder), "127.0.0.1:0", limits=LIMITS, password=password, connections_max=2
    ) as serving:
        with pytest.raises(psycopg.OperationalError, match="not that of this server"):
            psycopg.connect(serving.url, password="another one")
        with pytest.raises(psycopg.OperationalError, match="no password supplied"):
            psycopg.connect(serving.url)
        with ExitStack() as opened:
            for _ in range(2):
                connect = patient(psycopg.connect, serving.url, password=PASSWORD)
                assert opened.enter_context(connect).execute("SELECT 1").fetchone() == (1,)
            with pytest.raises(psycopg.OperationalError, match="All 2 connections"):
                psycopg.connect(serving.url, password=PASSWORD)
        patient(psycopg.connect, serving.url, password=PASSWORD).close()


def patient(connect, *arguments, **named):
    """Connect, once the server has noticed that those before have left."""
    ends = time.monotonic() + 60
    while True:
        try:
            return connect(*arguments, **named)
        except psycopg.OperationalError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.05)


def test_an_address_that_others_reach_needs_a_password(folder):
    with (
        pytest.raises(ConfigError, match="no password"),
        serve_sql(scope_of(None, folder), "0.0.0.0:0"),
    ):
        pass


def test_with_a_certificate_connections_are_encrypted_or_refused(folder, tmp_path):
    certificate, key = make_certificate(tmp_path)
    with serve_sql(
        scope_of(None, folder),
        "127.0.0.1:0",
        limits=LIMITS,
        password=PASSWORD,
        certificate=certificate_of(certificate, key),
    ) as serving:
        url = f"{serving.url}?sslmode=verify-full&sslrootcert={certificate}"
        url = url.replace("127.0.0.1", "localhost") + "&hostaddr=127.0.0.1"
        with psycopg.connect(url, password=PASSWORD) as connection:
            assert connection.pgconn.ssl_in_use
            assert connection.execute("SELECT count(*) FROM kinds").fetchone() == (3,)
        with pytest.raises(psycopg.OperationalError, match="encrypted connections only"):
            psycopg.connect(f"{serving.url}?sslmode=disable", password=PASSWORD)
        idle = psycopg.connect(url, password=PASSWORD)  # ... and the server ends all the same
    with pytest.raises(psycopg.OperationalError):
        idle.execute("SELECT 1")
    idle.close()


def test_a_certificate_that_is_renewed_is_that_of_the_next_connection(folder, tmp_path):
    certificate, key = make_certificate(tmp_path)
    with serve_sql(
        scope_of(None, folder),
        "127.0.0.1:0",
        limits=LIMITS,
        password=PASSWORD,
        certificate=certificate_of(certificate, key),
    ) as serving:
        url = f"{serving.url}?sslmode=verify-full&sslrootcert={certificate}"
        url = url.replace("127.0.0.1", "localhost") + "&hostaddr=127.0.0.1"
        psycopg.connect(url, password=PASSWORD).close()
        make_certificate(tmp_path)  # clients trust this one alone now
        psycopg.connect(url, password=PASSWORD).close()


def test_a_key_that_is_encrypted_is_refused(tmp_path):
    certificate, key = make_certificate(tmp_path, passphrase=b"a passphrase")
    with pytest.raises(ConfigError, match="The key is encrypted"):
        certificate_of(certificate, key)
    with pytest.raises(ConfigError, match="no certificate"):
        certificate_of(None, key)


def make_certificate(folder, passphrase=None):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate, private = folder / "cert.pem", folder / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption()
            if passphrase is None
            else serialization.BestAvailableEncryption(passphrase),
        )
    )
    return certificate, private


def test_each_statement_of_many_clients_is_of_one_position_while_the_job_commits(tmp_path):
    write_clicks(tmp_path, draw_clicks(3, 60, 3), 3)
    app = sql_app(tmp_path)
    run_job(app, tmp_path, 5, {"clicks": [1, 1, 1]})
    done, failed, positions = threading.Event(), [], set()

    def ask(url):
        with psycopg.connect(url, autocommit=True) as connection:
            while not done.is_set():
                if connection.execute(DIFFERENCES, prepare=True).fetchone() != (0,):
                    failed.append(connection.info.parameter_status("millstream.position"))
                positions.add(connection.info.parameter_status("millstream.position"))

    with serve_sql(scope_of(app, None), "127.0.0.1:0", limits=LIMITS) as serving:
        threads = [threading.Thread(target=ask, args=(serving.url,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        run_job(sql_app(tmp_path), tmp_path, 8)
        done.set()
        for thread in threads:
            thread.join()
        with psycopg.connect(serving.url, autocommit=True) as connection:
            connection.execute('SET millstream.at_least = \'{"clicks": {"0": 1}}\'')
            assert connection.execute("SELECT sum(n) > 0 FROM totals").fetchone() == (True,)
    assert not failed
    assert len(positions) > 1, "they asked while batches were committed"


def psql(server, command):
    done = subprocess.run(
        ["psql", server.url, "-X", "-A", "-c", command],
        capture_output=True,
        check=False,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert "ERROR" not in done.stderr, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(shutil.which("psql") is None, reason="psql is not installed: postgresql-client")
def test_psql_lists_and_describes_tables(server):
    assert psql(server, r"\dt")[2:4] == [
        "topics|clicks|table|millstream",
        "views|kinds|table|millstream",
    ]
    described = psql(server, r"\d kinds")
    assert "exact|numeric(38,9)|||" in described
    assert "moment|timestamp with time zone|||" in described
    assert '    "kinds_pkey" PRIMARY KEY, btree (id)' in described
    assert psql(server, r"\l")[2].startswith("kinds|millstream|UTF8")
    assert [line.split("|")[0] for line in psql(server, r"\dn")[2:4]] == ["topics", "views"]
    for command in (r"\d", r"\d+", r"\dv", r"\di", r"\df", r"\du", r"\dx", r"\dp", r"\d+ clicks"):
        psql(server, command)
    assert psql(server, "SELECT id, flag FROM kinds ORDER BY 1; SELECT 2 AS two")[:5] == [
        "id|flag",
        "1|t",
        "2|",
        "3|f",
        "(3 rows)",
    ]


def jdbc_jar():
    try:
        return DRIVER.jars() / "postgresql-42.7.7.jar"
    except EnvironmentProblem as problem:
        pytest.skip(str(problem))


@pytest.mark.long
def test_a_tool_on_jdbc_finds_tables_asks_and_fetches(folder):
    jar = jdbc_jar()
    program = Path(__file__).with_name("JdbcClient.java")
    with serve_sql(
        scope_of(None, folder), "127.0.0.1:0", limits=LIMITS, password=PASSWORD
    ) as serving:
        url = f"jdbc:postgresql://127.0.0.1:{serving.port}/kinds"
        done = subprocess.run(
            [
                "java",
                "-XX:TieredStopAtLevel=1",
                "-Dfile.encoding=UTF-8",
                "-Dstdout.encoding=UTF-8",
                "-cp",
                str(jar),
                str(program),
                url,
                "me",
                PASSWORD,
            ],
            capture_output=True,
            check=False,
            timeout=280,
        )
    assert not done.stderr, done.stderr.decode()
    found = done.stdout.decode().split("\n")
    assert found[:2] == ["product|PostgreSQL|15", "readonly|false"]
    assert [
        line for line in found if line.startswith(("table|", "catalog|", "key|", "schema|"))
    ] == [
        "catalog|kinds",
        "schema|information_schema",
        "schema|pg_catalog",
        "schema|topics",
        "schema|views",
        "table|topics|clicks|TABLE",
        "table|views|kinds|TABLE",
        "key|id|1|kinds_pkey",
    ]
    assert "column|exact|numeric|2|38|9|4" in found
    assert "column|moment|timestamptz|93|35|6|7" in found
    for number in (0, 7):  # as text, and in binary form
        assert f"row{number}|2|" + "|".join(["null"] * 9) in found
        assert (
            f"row{number}|3|-9223372036854775808|-0.1|-0.000000001||false|9999-12-31T00:00:00Z|2026-02-28||[]"
            in found
        )
        assert (
            f"row{number}|1|9223372036854775807|NaN|12345678901234567890123456789.123456789|a'\"\\é€😀"
            in found
        )
    assert found.count("|true|1969-12-31T23:59:59.999999Z|0001-01-01|00ff27|[1,null]") == 2
    assert found[-11:-1] == [
        (
            "given|-9223372036854775808|it's \\ \" ; -- /* é|-12345678901234567890.000000001|2026-03-28T23:30:00.123456Z|"
            "1999-12-31|0027ff|true|-0.1|00112233-4455-6677-8899-aabbccddeeff|42"
        ),
        "described|2|bool|2",
        "nulls|t|t",
        'lists|[1, null, 3]|[x, y,"]|{"k": 1}',
        "fetched|1000|499500",
        "error|42P01",
        "failed|25P02",
        "cancelled|57014",
        "refused|25006",
        "valid|true",
    ]


def test_bytes_of_a_password_are_not_kept():
    from millstream.sql_queries.server.scram import ScramVerifier

    kept = repr(ScramVerifier.of(PASSWORD))
    assert PASSWORD not in kept
    assert base64.b64encode(PASSWORD.encode()).decode() not in kept


def test_a_token_is_the_password_of_its_name_until_it_is_removed(folder, tmp_path):
    path = tmp_path / "tokens"
    reader, other = TokenFile(path).add("grafana", "read"), TokenFile(path).add("bob", "operate")
    with serve_sql(
        scope_of(None, folder), "0.0.0.0:0", limits=LIMITS, tokens=TokenFile.opened(path)
    ) as serving:
        url = serving.url.replace("0.0.0.0", "127.0.0.1")
        with psycopg.connect(url, user="grafana", password=reader) as connection:
            assert connection.execute("SELECT count(*) FROM kinds").fetchone() == (3,)
        for user, password in (("grafana", other), ("nobody", reader), ("", reader)):
            with pytest.raises(psycopg.OperationalError, match="not that of this server"):
                psycopg.connect(url, user=user or " ", password=password)
        TokenFile(path).remove("grafana")
        with pytest.raises(psycopg.OperationalError, match="not that of this server"):
            psycopg.connect(url, user="grafana", password=reader)
        psycopg.connect(url, user="bob", password=other).close()


def test_an_unknown_user_is_answered_as_a_known_one_is(tmp_path):
    """What a client is sent before its proof does not tell whether there is such a token."""
    TokenFile(tmp_path / "tokens").add("known", "read")
    rules = LoginRules("d", None, None, TokenFile.opened(tmp_path / "tokens"))
    first, again = rules.verifier_of("unknown"), rules.verifier_of("unknown")
    known = rules.verifier_of("known")
    assert first == again
    assert first != rules.verifier_of("unknown2")
    assert [len(first.salt), first.iterations] == [len(known.salt), known.iterations]


def test_a_file_with_a_token_itself_is_refused_as_nobody_could_log_in(folder, tmp_path):
    (tmp_path / "token").write_text("0123456789abcdef")
    tokens = TokenFile.opened(tmp_path / "token")
    with (
        pytest.raises(ConfigError, match="millstream token add"),
        serve_sql(scope_of(None, folder), "127.0.0.1:0", tokens=tokens),
    ):
        pass
