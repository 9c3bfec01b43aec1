"""Templates that mean harm: each ends soon, with an error, and without making anything large."""

import resource
import threading

import pytest

from ep_runtime.frontend.text.errors import TemplateError
from ep_runtime.frontend.text.template import ChatTemplate, RenderLimits

USER = [{"role": "user", "content": "x" * 1000}]
LIMITS = RenderLimits(max_chars=1 << 20, max_template_chars=50_000, cpu_seconds=0.3)


def render(source: str, messages: list[dict] | None = None) -> str:
    return ChatTemplate({"default": source}, limits=LIMITS).render(messages or USER)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% macro f(n) %}{% if n %}{% set x = f(n - 1) %}{% set x = f(n - 1) %}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in [[[[[[1, 1] * 30] * 30] * 30] * 30] * 30] recursive %}{{ loop(x) if x is iterable }}{% endfor %}",
    ],
    ids=["nested_loops", "shared_range", "lists", "recursion", "exponential", "recursive_loop"],
)
def test_endless_work_ends(source: str) -> None:
    with pytest.raises(TemplateError, match=r"ran longer than 0\.3 s|nested too deeply"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}0123456789abcdef{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * 'a' }}",
        "{{ [0] * 1000000000 }}",
        "{{ 10 ** 10000000 }}",
        "{{ 10 ** 1000 ** 1000 }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x | replace('a', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('b', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ''.join([ns.x, ns.x]) %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ ['a'] | map('center', 1000000000) | list }}",
        "{{ 'a\nb' | indent(1000000000) }}",
        "{{ {'a': 1} | tojson(indent=1000000000) }}",
        "{{ strftime_now('%1000000000d') }}",
    ],
)
def test_large_values_are_refused_before_they_exist(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateError):
        render(source)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include 'other' %}",
        "{{ lipsum() }}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{{ none + 1 }}",
    ],
)
def test_ways_out_are_closed(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


def test_the_budget_is_out_of_reach() -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateError, match="ran longer"):
        render("{% set budget = 1 %}{% macro f() %}" + loops + "{% endmacro %}{{ f() }}")


def test_templates_and_messages_nested_too_deeply() -> None:
    with pytest.raises(TemplateError, match="nested too deeply"):
        render("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")
    with pytest.raises(TemplateError, match="longer than"):
        render("x" * 60_000)
    nested: list = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(TemplateError, match="nested too deeply"):
        render("{{ messages[0].extra | tojson }}", [{"role": "user", "content": "x", "extra": nested}])


def test_a_large_honest_conversation_fits() -> None:
    source = "{% for m in messages %}{{ '<' + m.role + '>' ~ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "y" * 200} for _ in range(4000)]
    assert len(render(source, messages)) == 4000 * 206


def test_renders_in_threads_have_budgets_of_their_own() -> None:
    template = ChatTemplate({"default": "{% for i in range(20000) %}{{ i % 10 }}{% endfor %}"}, limits=LIMITS)
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(len(template.render(USER)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [20000] * 4
