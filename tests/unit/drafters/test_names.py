"""Names of drafters, and what is said of each."""

import json

import pytest

from outrider.cli.main import main
from outrider.config.deployment import DraftConfig
from outrider.drafters.names import DRAFTERS, SHIPPED, DrafterChoice, LookupKind, parse_drafter
from outrider.errors import SettingError


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("ngram", DrafterChoice(LookupKind.NGRAM, "coordinator")),
        ("owner/model", DrafterChoice(None, "draft", "owner/model")),
        ("./a:b/c", DrafterChoice(None, "draft", "./a:b/c")),
        ("hybrid:ngram,a/b", DrafterChoice(LookupKind.NGRAM, "draft", "a/b")),
        ("hybrid:suffix,eagle3:/a,b", DrafterChoice(LookupKind.SUFFIX, "target", "/a,b", "eagle3")),
        ("hybrid:suffix,mtp", DrafterChoice(LookupKind.SUFFIX, "target", "mtp", "mtp")),
    ],
)
def test_a_name_says_what_proposes(name: str, choice: DrafterChoice) -> None:
    assert parse_drafter(name) == choice
    assert DraftConfig(model=name).drafter == choice


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("suffix:4", "`suffix` takes no argument"),
        ("mtp:a/b", "`mtp` takes no argument"),
        ("hybrid:demo,suffix", "LOOKUP is `ngram` or `suffix`"),
        ("hybrid:suffix,hybrid:ngram,demo", "its second part must be a model"),
        ("eagle3:", "the name of the head is missing"),
        ("hybrid:suffix,eagle:a", "there is no kind `eagle`; did you mean eagle3?"),
    ],
)
def test_a_name_that_is_none_is_refused_with_those_that_are(name: str, says: str) -> None:
    with pytest.raises(SettingError, match=r"must be `ngram`, `suffix`, a model") as caught:
        DraftConfig(model=name)
    assert caught.value.key == "draft_model"
    assert says in caught.value.reason


def test_every_kind_is_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["drafters", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["drafters"]
    names = [entry["draft_model"] for entry in listed]
    assert names == [name for name, *_ in DRAFTERS]
    assert {*SHIPPED} < {*names}
    assert all(all(entry.values()) for entry in listed)
    assert main(["drafters"]) == 0
    table = capsys.readouterr().out
    assert "…" not in table
    assert max(map(len, table.splitlines())) <= 80
    assert all(name in table for name in names)
    said = " ".join(
        " ".join(line[len(max(names, key=len)) :].split()) for line in table.splitlines()
    )
    for _, *facts in DRAFTERS:
        assert [fact for fact in facts if fact not in said] == []
