import pytest
from pydantic import BaseModel, Field, field_validator

from hotshoe.api import PluginOptions
from hotshoe.errors import ConfigError
from hotshoe.plugin_options import validate_plugin_options


class Tier(BaseModel):
    weight: int = 1


class Options(PluginOptions):
    size: int = Field(default=4, ge=1)
    label: str = "x"
    tier: Tier = Tier()
    tiers: tuple[Tier, ...] = ()

    @field_validator("label")
    @classmethod
    def _short(cls, value: str) -> str:
        if len(value) > 3:
            raise ValueError("at most 3 letters")
        return value


class Strict(Tier, PluginOptions):
    needed: float


class Nothing(PluginOptions):
    pass


def test_text_from_a_command_line_is_coerced() -> None:
    assert validate_plugin_options(Options, {"size": "8"}, "a.options").size == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "a.options.size: got 0, allowed: an integer >= 1"),
        ({"size": "many"}, "a.options.size: got 'many', allowed: an integer >= 1"),
        (
            {"sise": 1},
            "a.options.sise: unknown option; options of this plugin: size, label, tier, tiers "
            "(did you mean 'size'?)",
        ),
        ({"label": "long"}, "a.options.label: got 'long', value error, at most 3 letters"),
        ({"tier": {"weight": "w"}}, "a.options.tier.weight: got 'w', allowed: an integer"),
        (
            {"tiers": [{"weight": "w"}]},
            "a.options.tiers.0.weight: got 'w', input should be a valid integer, unable to parse "
            "string as an integer",
        ),
    ],
)
def test_wrong_option_is_named_by_its_path_with_what_is_allowed(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_plugin_options(Options, options, "a.options")
    assert str(caught.value) == message


def test_missing_option_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^a.options.needed: required but not set; options of"):
        validate_plugin_options(Strict, {}, "a.options")


def test_plugin_without_options_says_so() -> None:
    with pytest.raises(ConfigError, match=r"unknown option; options of this plugin: none$"):
        validate_plugin_options(Nothing, {"x": 1}, "a.options")


class Lists(PluginOptions):
    token_ids: list[int] = Field(default=[])
    texts: list[list[int]] = Field(default=[])
    names: tuple[str, ...] = ()
    tiers: list[dict[str, float]] | None = None


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("token_ids", "a list of integers"),
        ("texts", "a list of lists of integers"),
        ("names", "a list of text"),
        ("tiers", "a list of mappings, or none"),
    ],
)
def test_wrong_list_is_told_what_it_may_hold(name: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate_plugin_options(Lists, {name: 3}, "scheduler.options")
    assert str(error.value) == f"scheduler.options.{name}: got 3, allowed: {allowed}"
