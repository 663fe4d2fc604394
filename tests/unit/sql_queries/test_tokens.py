import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import SqlError
from millstream.sql_queries.sql_table import quote_text
from millstream.sql_queries.tokens import NamesInText, split_statements, to_text, tokenize
from millstream.views.state_store.view_table import quote_identifier

PIECES = st.sampled_from(
    [
        "select",
        " ",
        "\n",
        ";",
        "'",
        "''",
        '"',
        "$1",
        "$$",
        "$a$",
        "--",
        "/*",
        "*/",
        "E'",
        "\\",
        "1e-5",
        "::",
        "x.y",
        "é",
    ]
)


@given(st.lists(PIECES, max_size=12).map("".join))
def test_tokens_are_the_whole_text_or_an_error(text):
    try:
        tokens = tokenize(text)
    except SqlError as error:
        assert error.sqlstate == "42601"
        return
    joined = "".join(token.text for token in tokens)
    if "/*" not in text:  # comments become a space
        assert joined == text


@given(st.text(), st.text())
def test_what_is_quoted_is_one_token_whatever_it_holds(text, name):
    string, quoted = tokenize(f"{quote_text(text)} {quote_identifier(name)}")[::2]
    assert (string.kind, string.text) == ("string", quote_text(text))
    assert (quoted.kind, quoted.name) == ("quoted", name)


def test_semicolons_within_strings_names_and_comments_end_no_statement():
    text = """select ';' as ";"; -- ;
    /* ; /* ; */ ; */ select $$;$$, $x$;$x$, E'\\';' ;;"""
    assert [to_text(tokens) for tokens in split_statements(text)] == [
        "select ';' as \";\"",
        "-- ;\n      select $$;$$, $x$;$x$, E'\\';'",
    ]


def test_a_table_may_be_named_in_any_case_and_within_strings():
    names = NamesInText(tokenize("SELECT * FROM Totals, 'ad-clicks', topics.\"A.b\""))
    assert "totals" in names
    assert "ad-clicks" in names
    assert "a.b" in names
    assert "total" not in names


@pytest.mark.parametrize("text", ["'", '"', "$$", "/* /* */", "E'\\'"])
def test_what_does_not_end_is_an_error_that_says_so(text):
    with pytest.raises(SqlError, match="end"):
        tokenize(text)
