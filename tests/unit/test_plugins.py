import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hotshoe.api import (
    KINDS,
    Scheduler,
    SchedulerContext,
    StepPlanner,
)
from hotshoe.errors import (
    ConfigError,
    PluginConflictError,
    PluginContractError,
    PluginDeniedError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
    SchedulerError,
)
from hotshoe.plugins import (
    LoadedPlugin,
    PluginIdentity,
    PluginInfo,
    PluginRegistry,
    RefusedPlugin,
    discover,
)
from hotshoe.testing.plugins import make_distribution

SCHEDULER = """
    from hotshoe.api import Component, PluginOptions, Scheduler, hookimpl

    class Options(PluginOptions):
        aging_s: float = 1.0
        reverse: bool = False

    class Shortest(Scheduler):
        def __init__(self, options, context):
            self.options, self.context = options, context

        def schedule(self, step):
            pass

    @hookimpl
    def hotshoe_component():
        return Component(contract="scheduler/0", factory=Shortest, options=Options)
"""

CONTEXT = SchedulerContext(
    max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, block_size=16, num_blocks=8
)

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install one plugin each call, by default the scheduler ``acme`` of the distribution acme."""
    count = itertools.count()

    def install_one(
        source: str = SCHEDULER,
        *,
        name: str = "acme",
        distribution: str = "acme",
        version: str = "1.0",
        module: str = "acme_sched",
        kind: str = "schedulers",
        target: str | None = None,
    ) -> None:
        folder = tmp_path / f"{next(count)}-{distribution}"
        entry_points = {f"hotshoe.{kind}": {name: target or module}}
        make_distribution(
            folder, distribution, version, modules={module: source}, entry_points=entry_points
        )
        monkeypatch.syspath_prepend(str(folder))

    yield install_one
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def component(**fields: str) -> str:
    """A module whose component has these fields, given as source text."""
    given = {"contract": '"scheduler/0"', "factory": "build"} | fields
    arguments = ", ".join(f"{name}={value}" for name, value in given.items())
    return f"""
        from hotshoe.api import Component, Scheduler, SchedulerError, hookimpl

        def build(options, context):
            return 3

        @hookimpl
        def hotshoe_component():
            return Component({arguments})
    """


def test_selected_plugin_is_imported_and_built_with_its_validated_options(install: Install) -> None:
    install()
    registry = PluginRegistry()
    loaded = registry.load("schedulers", "acme")
    assert loaded.info == PluginInfo("schedulers", "acme", "acme", "1.0", "acme_sched")
    options = {"aging_s": "2.5", "reverse": "true"}
    built = registry.build(loaded, options, CONTEXT, section="scheduler")
    assert isinstance(built, Scheduler)
    assert built.options.aging_s == 2.5  # type: ignore[attr-defined]
    assert built.options.reverse is True  # type: ignore[attr-defined]
    assert built.context is CONTEXT  # type: ignore[attr-defined]


def test_loading_twice_gives_the_same_plugin(install: Install) -> None:
    install()
    registry = PluginRegistry()
    assert registry.load("schedulers", "acme") is registry.load("schedulers", "acme")


def test_unselected_plugin_that_raises_at_import_harms_nobody(install: Install) -> None:
    install()
    install("1 / 0", name="broken", distribution="broken-dist", module="broken_sched")
    registry = PluginRegistry()
    registry.load("schedulers", "acme")
    assert "broken_sched" not in sys.modules
    assert "broken" in [info.name for info in discover("schedulers")]


@pytest.mark.parametrize("source", ["1 / 0", "import not_there_at_all", "def ", "exit(3)"])
def test_selected_plugin_that_fails_at_import_is_named_with_its_traceback(
    install: Install, source: str
) -> None:
    install(source, name="broken", distribution="broken-dist", version="0.3", module="broken_sched")
    with pytest.raises(PluginLoadError) as caught:
        PluginRegistry().load("schedulers", "broken")
    message = str(caught.value)
    assert message.startswith(
        "scheduler plugin 'broken' (broken-dist 0.3, module 'broken_sched') failed to import:\n"
    )
    assert "Traceback (most recent call last)" in message
    assert "broken_sched.py" in message or "SyntaxError" in message


def test_missing_attribute_of_an_entry_point_is_a_load_error(install: Install) -> None:
    install(target="acme_sched:Nothing")
    with pytest.raises(PluginLoadError, match="has no attribute 'Nothing'"):
        PluginRegistry().load("schedulers", "acme")


def test_entry_point_may_name_an_object_that_holds_the_hooks(install: Install) -> None:
    install(
        """
        from hotshoe.api import Component, Scheduler, hookimpl

        class Policy(Scheduler):
            def schedule(self, step):
                pass

        class Plugin:
            @staticmethod
            @hookimpl
            def hotshoe_component():
                return Component(contract="scheduler/0", factory=lambda options, context: Policy())
        """,
        target="acme_sched:Plugin",
    )
    registry = PluginRegistry()
    loaded = registry.load("schedulers", "acme")
    assert loaded.module is sys.modules["acme_sched"].Plugin
    assert isinstance(registry.build(loaded, {}, CONTEXT, section="scheduler"), Scheduler)


def test_unknown_name_lists_what_is_installed_and_the_closest(install: Install) -> None:
    install()
    with pytest.raises(PluginNotFoundError) as caught:
        PluginRegistry().load("schedulers", "acmee")
    message = str(caught.value)
    assert message.startswith("no scheduler plugin named 'acmee'; installed: acme (acme 1.0), ")
    assert "fcfs (hotshoe " in message
    assert message.endswith("(did you mean 'acme'?)")


def test_unknown_kind_lists_the_kinds() -> None:
    with pytest.raises(PluginNotFoundError, match="no plugin kind named 'scheduler'; kinds: ") as e:
        PluginRegistry().load("scheduler", "fcfs")
    assert str(e.value).endswith("(did you mean 'schedulers'?)")
    with pytest.raises(PluginNotFoundError, match="no plugin kind named 'x'"):
        discover("x")


def test_name_offered_by_two_distributions_is_a_conflict_only_when_selected(
    install: Install,
) -> None:
    install(distribution="one", module="one_sched")
    install(distribution="two", module="two_sched")
    registry = PluginRegistry()
    assert [info.distribution for info in discover("schedulers") if info.name == "acme"] == [
        "one",
        "two",
    ]
    with pytest.raises(PluginConflictError) as caught:
        registry.load("schedulers", "acme")
    assert str(caught.value).startswith(
        "scheduler plugin 'acme' is offered by one 1.0 (module 'one_sched') and "
        "two 1.0 (module 'two_sched'); uninstall one"
    )
    assert not {"one_sched", "two_sched"} & sys.modules.keys()
    settled = PluginRegistry(deny=["two"]).load("schedulers", "acme")
    assert settled.info.distribution == "one"


def test_distribution_visible_twice_counts_once(install: Install) -> None:
    install()
    install()
    assert len([info for info in discover("schedulers") if info.name == "acme"]) == 1
    PluginRegistry().load("schedulers", "acme")


@pytest.mark.parametrize(
    ("registry", "why"),
    [
        (PluginRegistry(allow=["other"]), r"plugins.allow has only \['other'\]"),
        (PluginRegistry(allow=[]), r"plugins.allow has only \[\]"),
        (PluginRegistry(deny=["ACME_Corp"]), "plugins.deny has 'acme.corp'"),
        (PluginRegistry(allow=["acme-corp"], deny=["acme-corp"]), "plugins.deny has 'acme.corp'"),
        (PluginRegistry(safe_mode=True), "safe mode uses hotshoe's own plugins only"),
    ],
)
def test_denied_plugin_is_refused_before_it_is_imported(
    install: Install, registry: PluginRegistry, why: str
) -> None:
    install(distribution="acme.corp")
    with pytest.raises(PluginDeniedError, match=why):
        registry.load("schedulers", "acme")
    assert "acme_sched" not in sys.modules


def test_allowed_distribution_is_matched_by_its_normalised_name(install: Install) -> None:
    install(distribution="acme.corp")
    registry = PluginRegistry(allow=["Acme_Corp"])
    assert registry.load("schedulers", "acme").info.distribution == "acme.corp"


def test_builtins_need_not_be_allowed_and_work_in_safe_mode() -> None:
    for registry in (PluginRegistry(allow=[]), PluginRegistry(safe_mode=True)):
        assert registry.find("schedulers", "fcfs").is_builtin


def set_version(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    monkeypatch.setitem(KINDS, "schedulers", replace(KINDS["schedulers"], version=version))


def test_plugin_of_a_past_contract_is_to_be_upgraded(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    set_version(monkeypatch, 3)
    with pytest.raises(
        PluginContractError,
        match=r"written for contract 'scheduler/0' but hotshoe \S+ speaks 'scheduler/3'; "
        r"upgrade acme, or use an older hotshoe$",
    ):
        PluginRegistry().load("schedulers", "acme")


def test_plugin_of_a_future_contract_asks_for_a_newer_hotshoe(install: Install) -> None:
    install(component(contract='"scheduler/7"'))
    with pytest.raises(PluginContractError, match=r"upgrade hotshoe, or use an older acme$"):
        PluginRegistry().load("schedulers", "acme")


@pytest.mark.parametrize("contract", ["sampler/0", "scheduler", "scheduler/x", "scheduler/-1"])
def test_contract_of_another_kind_or_form_is_refused(install: Install, contract: str) -> None:
    install(component(contract=repr(contract)))
    with pytest.raises(PluginContractError, match="allowed: 'scheduler/0'"):
        PluginRegistry().load("schedulers", "acme")


def test_module_without_a_component_says_how_to_add_one(install: Install) -> None:
    install("from hotshoe.api import Component")
    with pytest.raises(PluginLoadError, match=r"describes no component; define a function hotsh"):
        PluginRegistry().load("schedulers", "acme")


def test_component_hook_that_raises_is_a_load_error(install: Install) -> None:
    install("from hotshoe.api import hookimpl\n@hookimpl\ndef hotshoe_component(): 1 / 0")
    with pytest.raises(PluginLoadError, match="ZeroDivisionError"):
        PluginRegistry().load("schedulers", "acme")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def hotshoe_component(): return None", "returned None from hotshoe_component"),
        ("def hotshoe_component(): return 'fcfs'", "returned 'fcfs' from hotshoe_component"),
        ("def hotshoe_component(engine): return None", "engine"),
        ("def hotshoe_componentt(): return None", "hotshoe_componentt"),
        ("def hotshoe_step_committed(record, more): pass", "more"),
    ],
)
def test_hook_that_does_not_fit_is_refused(install: Install, source: str, message: str) -> None:
    install(f"from hotshoe.api import hookimpl\n@hookimpl\n{source}")
    registry = PluginRegistry()
    with pytest.raises(PluginContractError, match=message):
        registry.load("schedulers", "acme")
    assert registry.fingerprint() == ()


@pytest.mark.parametrize("field", ["factory", "options"])
def test_component_with_an_unusable_field_is_refused(install: Install, field: str) -> None:
    install(component(**{field: "int(3)"}))
    with pytest.raises(PluginContractError, match=f"has {field}=3; allowed: "):
        PluginRegistry().load("schedulers", "acme")


def test_plugin_that_cannot_work_here_gives_its_reasons(install: Install) -> None:
    install(component(unsupported="('no such device', 'no licence')"))
    with pytest.raises(PluginLoadError, match="can't work here: no such device; no licence"):
        PluginRegistry().load("schedulers", "acme")


def load_and_build(options: dict[str, object] | None = None) -> object:
    registry = PluginRegistry()
    loaded = registry.load("schedulers", "acme")
    return registry.build(loaded, options or {}, CONTEXT, section="scheduler")


def test_object_of_a_wrong_base_class_is_refused_with_the_missing_methods(
    install: Install,
) -> None:
    install(component())
    with pytest.raises(
        PluginContractError,
        match=r"built an object of type builtins.int; allowed: an instance of a subclass of "
        r"hotshoe.api.Scheduler; methods missing: schedule$",
    ):
        load_and_build()


def test_class_returned_instead_of_an_instance_is_refused(install: Install) -> None:
    install(component(factory="lambda options, context: Scheduler"))
    with pytest.raises(PluginContractError, match="the class Scheduler and not an instance"):
        load_and_build()


def test_object_without_a_method_of_its_interface_is_refused(install: Install) -> None:
    install(component(factory="lambda options, context: type('Lazy', (Scheduler,), {})()"))
    with pytest.raises(PluginContractError, match="without the methods schedule of"):
        load_and_build()


def test_factory_that_raises_is_a_load_error_with_its_cause(install: Install) -> None:
    install(component(factory="lambda options, context: 1 / 0"))
    with pytest.raises(
        PluginLoadError, match=r"(?s)failed to build:\n.*ZeroDivisionError"
    ) as caught:
        load_and_build()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("factory", ["lambda: None", "lambda options: None", "object"])
def test_factory_that_takes_other_arguments_is_refused_with_those_it_gets(
    install: Install, factory: str
) -> None:
    install(component(factory=factory))
    with pytest.raises(
        PluginContractError,
        match=r"can't be called as factory\(options, context\) with \w+ and SchedulerContext",
    ):
        load_and_build()


def test_own_errors_of_a_factory_pass_through(install: Install) -> None:
    install(component(factory="build").replace("return 3", "raise SchedulerError('too few rows')"))
    with pytest.raises(SchedulerError, match="too few rows"):
        load_and_build()


def test_wrong_options_are_refused_with_their_paths_and_the_closest_name(
    install: Install,
) -> None:
    install()
    with pytest.raises(ConfigError) as caught:
        load_and_build({"agng_s": 1, "reverse": "perhaps"})
    assert str(caught.value).splitlines() == [
        "2 problems in the configuration:",
        "  scheduler.options.reverse: got 'perhaps', allowed: true or false",
        "  scheduler.options.agng_s: unknown option; options of this plugin: aging_s, reverse "
        "(did you mean 'aging_s'?)",
    ]


def test_candidates_for_auto_are_builtins_by_priority_and_refusals_have_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Install
) -> None:
    install(component(auto_priority="99"), name="third", distribution="third", module="third_sched")
    sources = {
        "slow": component(auto_priority="1"),
        "fast": component(auto_priority="5"),
        "manual": component(),
        "elsewhere": component(auto_priority="3", unsupported="('no such device',)"),
        "broken": "1 / 0",
    }
    # stands in front of the real hotshoe, so its plugins are the built-in ones
    make_distribution(
        tmp_path,
        "hotshoe",
        modules={f"own_{name}": source for name, source in sources.items()},
        entry_points={"hotshoe.schedulers": {name: f"own_{name}" for name in sources}},
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = PluginRegistry()
    candidates = registry.candidates("schedulers")
    assert [one.info.name for one in candidates] == ["fast", "elsewhere", "slow", "broken"]
    assert [isinstance(one, LoadedPlugin) for one in candidates] == [True, False, True, False]
    assert isinstance(candidates[1], RefusedPlugin)
    assert candidates[1].reasons == ("no such device",)
    assert isinstance(candidates[3], RefusedPlugin)
    assert "ZeroDivisionError" in candidates[3].reasons[0]
    assert "third_sched" not in sys.modules
    assert registry.fingerprint() == ()
    registry.activate(candidates[0])
    assert [identity.name for identity in registry.fingerprint()] == ["fast"]


def test_refused_builtins_of_a_deny_list_say_so() -> None:
    candidates = PluginRegistry(deny=["hotshoe"]).candidates("schedulers")
    assert {type(one) for one in candidates} == {RefusedPlugin}
    assert candidates[0].reasons == ("is excluded: plugins.deny has 'hotshoe'",)  # type: ignore[union-attr]


def test_instance_that_implements_its_interface_is_adopted() -> None:
    class Mine(Scheduler):
        def schedule(self, step: StepPlanner) -> None:
            pass

    info = PluginRegistry().adopt("schedulers", Mine())
    assert (info.name, info.distribution, info.version) == ("Mine", "instance", "")


def test_instance_that_does_not_is_refused_with_the_missing_methods() -> None:
    class Mine:
        pass

    with pytest.raises(PluginContractError) as caught:
        PluginRegistry().adopt("schedulers", Mine())
    message = str(caught.value)
    assert message.startswith("scheduler plugin 'Mine' (instance, module ")
    assert message.endswith("methods missing: schedule")


def test_two_names_for_one_module_are_refused(install: Install) -> None:
    install()
    install(name="acme2", distribution="acme-two")
    registry = PluginRegistry()
    registry.load("schedulers", "acme")
    with pytest.raises(PluginContractError, match="same object as schedulers/acme; give each name"):
        registry.load("schedulers", "acme2")


def test_child_process_with_the_same_plugins_verifies(install: Install) -> None:
    install()
    parent, child = PluginRegistry(), PluginRegistry()
    parent.load("schedulers", "acme")
    child.load("schedulers", "acme")
    assert parent.fingerprint() == (
        PluginIdentity("schedulers", "acme", "acme", "1.0", "scheduler/0"),
    )
    child.verify(parent.fingerprint())


def test_child_process_lists_every_difference(install: Install) -> None:
    install()
    child = PluginRegistry()
    child.load("schedulers", "acme")
    parents = (
        PluginIdentity("schedulers", "acme", "acme", "0.9", "scheduler/0"),
        PluginIdentity("models", "llama", "hotshoe", "0.1.0", "model/0"),
    )
    with pytest.raises(PluginError) as caught:
        child.verify(parents)
    assert str(caught.value) == (
        "plugins differ from the parent process: models/llama: parent has hotshoe 0.1.0 (model/0), "
        "this process has none; schedulers/acme: parent has acme 0.9 (scheduler/0), this process "
        "has acme 1.0 (scheduler/0); install the same versions for both"
    )
    child.verify(parents, kinds=["samplers"])


def test_importing_the_loader_imports_no_torch_and_no_plugin() -> None:
    script = (
        "import sys, hotshoe.plugins as p; p.discover();"
        "loaded = {name.partition('.')[0] for name in sys.modules};"
        "print(sorted(name for name in loaded if name == 'torch' or name.startswith('hotshoe')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['hotshoe']"
