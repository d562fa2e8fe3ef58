//! Compares the language with Python's Jinja 2. Version 3.1.6, configured as in `transformers`, produced every
//! expected text.

use super::{Meter, Template, Value};

const MESSAGES: &str = r##"[{"role": "system", "content": " Be kind. "}, {"role": "user", "content": "Hi\nthere é🙂 it's \"q\""}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes", "tool_calls": [{"id": "1", "function": {"name": "find", "arguments": {"id": "é", "n": 3, "f": 2.5, "b": true, "x": null, "l": [1, [2, {"a": "b"}]]}}}]}, {"role": "tool", "content": {"state": "sent"}}, {"role": "tool", "content": "done"}]"##;
const TOOLS: &str = r##"[{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": ["integer", "null"], "enum": [1, 2]}}, "required": ["a"]}}}]"##;

const SHOWN: [(&str, &str); 85] = [
    (
        "{% set ns = namespace(l=[1]) %}{{ ns.l.append(2) }}{{ ns.l.pop(0) }}{{ ns.l.append('a') }}{{ ns.l.pop() }}{{ ns.l }}",
        "None1Nonea[2]",
    ),
    (
        "{{ messages }}",
        r#"[{'role': 'system', 'content': ' Be kind. '}, {'role': 'user', 'content': 'Hi\nthere é🙂 it\'s "q"'}, {'role': 'assistant', 'content': '<think>\nhm\n</think>\n\nyes', 'tool_calls': [{'id': '1', 'function': {'name': 'find', 'arguments': {'id': 'é', 'n': 3, 'f': 2.5, 'b': True, 'x': None, 'l': [1, [2, {'a': 'b'}]]}}}]}, {'role': 'tool', 'content': {'state': 'sent'}}, {'role': 'tool', 'content': 'done'}]"#,
    ),
    (
        "{{ tools }}",
        "[{'type': 'function', 'function': {'name': 'f', 'description': 'd', 'parameters': {'type': 'object', 'properties': {'a': {'type': 'string'}, 'b': {'type': ['integer', 'null'], 'enum': [1, 2]}}, 'required': ['a']}}}]",
    ),
    (
        "{{ none }} {{ true }} {{ 1.0 }} {{ 1e20 }} {{ 10 // 3 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 2 ** 10 }} {{ 2 ** -1 }}",
        "None True 1.0 1e+20 3 -4 2 3.5 1024 0.5",
    ),
    ("{{ 'a' ~ 1 ~ none ~ true }}", "a1NoneTrue"),
    (
        "{{ messages[1].content.split() }} {{ 'a,b,,c'.split(',') }} {{ 'a b  c'.split(None, 1) }} {{ 'a,b,c'.rsplit(',', 1) }}",
        r#"['Hi', 'there', 'é🙂', "it's", '"q"'] ['a', 'b', '', 'c'] ['a', 'b  c'] ['a,b', 'c']"#,
    ),
    (
        "{{ 'abc'[::-1] }} {{ 'abcdef'[1:4] }} {{ 'abcdef'[-3:] }} {{ 'abcdef'[::2] }} {{ 'abcdef'[4:1:-1] }} {{ [1,2,3][::-1] }} {{ [1,2,3][5:] }} {{ 'abc'[-1] }} {{ 'abc'[10] }}",
        "cba bcd def ace edc [3, 2, 1] [] c ",
    ),
    ("{% for k, v in {'a': 1, 'b': [2]}.items() %}{{ k }}={{ v }};{% endfor %}", "a=1;b=[2];"),
    ("{% for k in {'a': 1} %}{{ k }}{% endfor %}{% for c in 'héy' %}{{ c }}.{% endfor %}", "ah.é.y."),
    ("{% for x in [] %}x{% else %}empty{% endfor %}", "empty"),
    (
        "{% for m in messages if m.role != 'tool' %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}{{ loop.revindex }} {% endfor %}",
        "1/3TrueFalse3 2/3FalseFalse2 3/3FalseTrue1 ",
    ),
    (
        "{% for m in messages %}{{ loop.previtem.role if loop.previtem is defined else '-' }}>{{ loop.nextitem.role if not loop.last else '-' }} {{ loop.cycle('a','b') }} {{ loop.changed(m.role) }}|{% endfor %}",
        "->user a True|system>assistant b True|user>tool a True|assistant>tool b True|tool>- a False|",
    ),
    ("{% set x = 1 %}{% for i in range(3) %}{% set x = i %}{% endfor %}{{ x }}", "1"),
    (
        "{% set ns = namespace(a=1) %}{% for i in range(3) %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}",
        "4",
    ),
    ("{% if false %}a{% elif 1 == 1 %}b{% else %}c{% endif %}", "b"),
    (
        "{% macro m(a, b=2) %}[{{ a }}-{{ b }}]{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(b=5, a=4) }}{{ m() }}",
        "[1-2][1-3][4-5][-2]",
    ),
    (
        "{% macro w() %}<{{ caller() }}>{% endmacro %}{% call w() %}inner {{ bos_token }}{% endcall %}",
        "<inner <s>>",
    ),
    ("{% macro w2() %}{{ caller(3) }}{% endmacro %}{% call(x) w2() %}x={{ x }}{% endcall %}", "x=3"),
    (
        "{% macro rec(n) %}{{ n }}{% if n > 0 %}{{ rec(n - 1) }}{% endif %}{% endmacro %}{{ rec(5) }}",
        "543210",
    ),
    ("{% filter upper %}abc {{ 'd' }}{% endfilter %}", "ABC D"),
    (
        "{% set b %}block {{ 1 + 1 }}{% endset %}[{{ b }}]{% set c | upper | trim %} ab {% endset %}[{{ c }}]",
        "[block 2][AB]",
    ),
    ("{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a is defined }}", "3False"),
    ("{% raw %}{{ x }} {% if %}{% endraw %}", "{{ x }} {% if %}"),
    (
        "{% for a in [1,[2,[3]]] recursive %}{% if a is number %}{{ a }}{% else %}({{ loop(a) }}){% endif %}{% endfor %}",
        "1(2(3))",
    ),
    ("{{ messages | selectattr('role', 'equalto', 'tool') | list | length }}", "2"),
    (
        "{{ messages | map(attribute='role') | join(',') }} {{ messages | rejectattr('tool_calls', 'defined') | map(attribute='role') | list }}",
        "system,user,assistant,tool,tool ['system', 'user', 'tool', 'tool']",
    ),
    (
        "{{ [1,2,3]|first }} {{ [1,2,3]|last }} {{ 'abc'|first }} {{ [1,2,3]|reverse|list }} {{ 'abc'|reverse }} {{ 'abc'|length }}",
        "1 3 a [3, 2, 1] cba 3",
    ),
    (
        r#"{{ 'a<b>&"c"'|e }} {{ ' x '|trim }} {{ 'xxaxx'|trim('x') }} {{ 'aXbX'|replace('X','yy') }} {{ 'aXbX'|replace('X','y',1) }}"#,
        "a&lt;b&gt;&amp;&#34;c&#34; x a ayybyy aybX",
    ),
    (
        r#"{{ 'hello world'|title }} {{ 'hELLO'|capitalize }} {{ 'Hello'|lower|upper }} {{ "it's a"|title }}"#,
        "Hello World Hello HELLO It's A",
    ),
    (
        r#"{{ 'a\nb\n\nc'|indent(2) }}|{{ 'a\nb'|indent(2, true) }}|{{ 'a\n\nb'|indent('> ', true, true) }}"#,
        "a\n  b\n\n  c|  a\n  b|> a\n> \n> b",
    ),
    (
        "{{ undefinedvar|default('d') }} {{ ''|default('d', true) }} {{ none|d('x') }} {{ undefinedvar }}|",
        "d d None |",
    ),
    (
        "{{ 3.7|int }} {{ '42'|int }} {{ 'x'|int }} {{ 'x'|int(7) }} {{ '3.5'|float }} {{ 2.5|round }} {{ 2.567|round(2) }} {{ 2.1|round(0,'ceil') }} {{ -3|abs }}",
        "3 42 0 7 3.5 2.0 2.57 3.0 3",
    ),
    ("{{ '{} {}'.format('a', 1) }} {{ '{0}{1}{0}'.format('a', 'b') }}", "a 1 aba"),
    (
        "{{ [1,2,3,4,5]|batch(2)|list }} {{ [1,2,3]|batch(2,'x')|list }}",
        "[[1, 2], [3, 4], [5]] [[1, 2], [3, 'x']]",
    ),
    (
        "{{ 'abc'.isalpha() }} {{ '12'.isdigit() }} {{ 'ABC'.isupper() }} {{ 'aB'.title() }}",
        "True True True Ab",
    ),
    (
        "{{ 1 in [1,2] }} {{ 'a' in 'abc' }} {{ 'z' not in {'z':1} }} {{ 'x' in undefinedvar2 }}",
        "True True False False",
    ),
    (
        "{{ 1 < 2 < 3 }} {{ 1 == 1.0 }} {{ 'a' == 'a' }} {{ [1,2] == [1,2] }} {{ {'a':1} == {'a':1} }} {{ none == false }} {{ 'a' < 'b' }} {{ [1,2] < [1,3] }}",
        "True True True True True False True True",
    ),
    (
        "{{ not true or true and false }} {{ 0 or 'x' }} {{ 'a' and 'b' }} {{ none or '' or 'z' }}",
        "False x b z",
    ),
    ("{{ 'a' if false }}|{{ 'a' if true else 'b' }}|{{ 'a' if false else 'b' if false else 'c' }}", "|a|c"),
    (
        "{{ 3 is odd }} {{ 4 is even }} {{ 9 is divisibleby 3 }} {{ 1 is number }} {{ 1.5 is float }} {{ true is boolean }} {{ 'a' is string }} {{ {} is mapping }} {{ [] is sequence }} {{ 'a' is iterable }} {{ none is none }} {{ 1 is integer }} {{ 1 is eq 1 }} {{ 1 is in [1] }} {{ 'a' is not string }} {{ undefinedvar is defined }} {{ 1 is sameas 1 }} {{ true is true }}{{ 1 is true }} {{ 'ABC' is upper }}",
        "True True True True True True True True True True True True True True False False True TrueFalse True",
    ),
    (r#"{{ 'a' 'b' }} {{ "\u00e9\x41\\ \' \q" }} {{ 'tab\there' }}"#, "ab éA\\ ' \\q tab\there"),
    ("    indented", "    indented"),
    ("after", "after"),
    ("  {#- comment -#}  x", "x"),
    ("  {# c #}", ""),
    ("y", "y"),
    ("{%- if true -%}   a   {%- endif -%}   b", "ab"),
    ("{{ 1 -}}   2", "12"),
    ("   {{- 3 }}", "3"),
    ("  {%+ if true %}plus{% endif %}", "  plus"),
    (
        "{{ tools | tojson }}",
        r#"[{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": ["integer", "null"], "enum": [1, 2]}}, "required": ["a"]}}}]"#,
    ),
    (
        "{{ messages[2].tool_calls | tojson(indent=2) }}",
        "[\n  {\n    \"id\": \"1\",\n    \"function\": {\n      \"name\": \"find\",\n      \"arguments\": {\n        \"id\": \"é\",\n        \"n\": 3,\n        \"f\": 2.5,\n        \"b\": true,\n        \"x\": null,\n        \"l\": [\n          1,\n          [\n            2,\n            {\n              \"a\": \"b\"\n            }\n          ]\n        ]\n      }\n    }\n  }\n]",
    ),
    (
        "{{ messages[2].tool_calls | tojson(indent=4, ensure_ascii=true) }}",
        "[\n    {\n        \"id\": \"1\",\n        \"function\": {\n            \"name\": \"find\",\n            \"arguments\": {\n                \"id\": \"\\u00e9\",\n                \"n\": 3,\n                \"f\": 2.5,\n                \"b\": true,\n                \"x\": null,\n                \"l\": [\n                    1,\n                    [\n                        2,\n                        {\n                            \"a\": \"b\"\n                        }\n                    ]\n                ]\n            }\n        }\n    }\n]",
    ),
    (
        "{{ messages[1].content | tojson }} {{ tools|tojson(separators=(',', ':')) }}",
        r#""Hi\nthere é🙂 it's \"q\"" [{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object","properties":{"a":{"type":"string"},"b":{"type":["integer","null"],"enum":[1,2]}},"required":["a"]}}}]"#,
    ),
    ("{{ range(3)|list }} {{ range(5, 1, -2)|list }} {{ range(0)|list }}", "[0, 1, 2] [5, 3] []"),
    (
        "{% for i in range(10) %}{% if i == 3 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "0124",
    ),
    ("{% set a, b = 1, 2 %}{{ a }}{{ b }}{% for (x, y) in [(1, 2)] %}{{ x }}{{ y }}{% endfor %}", "1212"),
    ("{% do [1] %}x{% block foo %}in block{% endblock %}{% block b2 %}q{% endblock b2 %}", "xin blockq"),
    ("{% generation %}gen{% endgeneration %}", "gen"),
    ("{{ {'a': {'b': {}}} }}{{ {1: 'x', true: 'y'} }}", "{'a': {'b': {}}}{1: 'y'}"),
    (
        r#"{{ "x" ~ {'a': [1, 'b', none, 1.5]} }} {{ 'it\'s' ~ ["it's", 'say "hi"', 'both \' and "', 'nl\n'] }}"#,
        r#"x{'a': [1, 'b', None, 1.5]} it's["it's", 'say "hi"', 'both \' and "', 'nl\n']"#,
    ),
    (
        "{{ (messages|length - 1) - 2 }} {{ -1|abs }} {{ -2 ** 2 }} {{ 2 ** 3 ** 2 }} {{ 1 + 2 * 3 - 4 / 2 }}",
        "2 1 4 64 5.0",
    ),
    ("{{ messages[-1].content }} {{ messages[1:][0].role }} {{ messages[:-1]|length }}", "done user 4"),
    ("{{ 'a.b.c'.split('.')[-1] }} {{ ('x' ~ 'y')|upper }} {{ ['a']|join|upper }}", "c XY A"),
    (
        "{%- set sys = messages[0].content if messages[0].role == 'system' else '' %}{{ sys | trim }}",
        "Be kind.",
    ),
    (
        "{% if messages[0].role == 'system' and messages|length > 1 %}ok{% endif %}{% if tools is not none and tools %}t{% endif %}",
        "okt",
    ),
    ("{% if tools is iterable and tools | length > 0 %}yes{% endif %}", "yes"),
    (
        "{{ messages | selectattr('role', 'in', ['tool', 'user']) | map(attribute='role') | list }} {{ [1,2,3,4] | select('odd') | list }} {{ [1,0,none,'a'] | select | list }} {{ [1,2,3] | reject('eq', 2) | list }} {{ ['a','b'] | map('upper') | list }} {{ ['a b','c'] | map('replace', 'a', 'z') | join('-') }}",
        "['user', 'tool', 'tool'] [1, 3] [1, 'a'] [1, 3] ['A', 'B'] z b-c",
    ),
    (
        "{{ dict(a=1, b=2) }} {{ dict({'x': 1}, y=2) }} {{ namespace(a=1).a }}",
        "{'a': 1, 'b': 2} {'x': 1, 'y': 2} 1",
    ),
    (
        r#"{{ 'line1\nline2'.split('\n') | map('trim') | join('|') }} {{ 'a' | string }} {{ 5 | string | length }} {{ [] | string }}"#,
        "line1|line2 a 1 []",
    ),
    (
        "{{ messages|tojson|length }} {{ 'é'|tojson(ensure_ascii=true) }} {{ 1e-7 }} {{ 0.1 + 0.2 }} {{ 1e16 }} {{ 123456789012345678901234567890 }} {{ 100000.0 }}",
        r#"404 "\u00e9" 1e-07 0.30000000000000004 1e+16 123456789012345678901234567890 100000.0"#,
    ),
    (
        "{{ 7 is divisibleby(7) and 'x' }} {{ 'abc' | wordcount }} {{ [[1,2],[3]] | sum(start=[]) }} {{ [{'a': 1}, {'a': 2}] | sum(attribute='a') }} {{ [{'a': 2}, {'a': 1}] | sort(attribute='a') }}",
        "x 1 [1, 2, 3] 3 [{'a': 1}, {'a': 2}]",
    ),
    ("{% if true %}\n  a\n  {% if true %}\n  b\n  {% endif %}\n{% endif %}\nc\n", "  a\n  b\nc"),
    ("\n\n{% set x = 1 %}\n{{ x }}\n\n", "\n\n1\n"),
    ("{# c #}\na", "a"),
    ("a\n  {# c #}\n  b\n", "a\n  b"),
    ("{% for m in messages %}\n{{ m.role }}\n{% endfor %}", "system\nuser\nassistant\ntool\ntool\n"),
    ("   {{ 1 }}\n", "   1"),
    ("a {%- if true %} b {% endif -%} c", "a b c"),
    ("{% raw %}\n a {% endraw %}\nb", "\n a b"),
    ("  {% raw -%} x {%- endraw %}\n y", "x y"),
    ("{% if true %}{% endif %}  {% if true %}\nx{% endif %}", "  x"),
    ("\t{%- set a = 1 -%}\n\n x", "x"),
    ("{% set x %}\n a\n{% endset %}\n[{{ x }}]", "[ a\n]"),
    ("a\r\n{% if true %}\r\nb\r\n{% endif %}\r\nc\r\n", "a\nb\nc"),
];

/// Templates that Jinja rejects too.
const REFUSED: [&str; 14] = [
    "{% set ns = namespace(l=[]) %}{{ ns.l.pop() }}",
    "  {% if true %}",
    "  {% endif %}",
    "{% if true +%}",
    "keep{% endif %}",
    "{{ messages[0]['nope'] is defined }} {{ messages[0].nope }} {{ messages[0].nope.deeper }}",
    "{{ nope.x }}",
    "{{ 1 + 'a' }}",
    "{{ none + 1 }}",
    "{{ nope() }}",
    "{{ 'a'|nofilter }}",
    "{{ 1 is notest }}",
    "{{ [1,2,3].append(4) }}",
    "{{ messages.pop() }}",
];

fn render(source: &str) -> Result<String, String> {
    let given = Meter::unbounded();
    let json = |text: &str| {
        let json = serde_json::from_str(text).expect("valid JSON");
        Value::of_json(&json, &given).expect("within the limits")
    };
    let text = |text: &str| Value::text(text, &given).expect("within the limits");
    let variables = vec![
        ("messages", json(MESSAGES)),
        ("tools", json(TOOLS)),
        ("bos_token", text("<s>")),
        ("eos_token", text("</s>")),
    ];
    let template = Template::parse(source).map_err(|fault| fault.to_string())?;
    template.render(variables, &Meter::new(1_000_000, 1 << 20)).map_err(|fault| fault.to_string())
}

#[test]
fn templates_render_as_in_python() {
    for (source, expected) in SHOWN {
        assert_eq!(render(source).as_deref(), Ok(expected), "{source}");
    }
}

#[test]
fn templates_that_python_rejects_are_rejected_with_the_line() {
    for source in REFUSED {
        let error = render(source).expect_err(source);
        assert!(error.contains("(line 1 of the template)"), "{source}: {error}");
    }
}

#[test]
fn an_error_names_its_line_and_does_not_quote_the_input() {
    for (source, expected) in [
        (
            "a\n{% if true %}\n\n{{ messages[1].content - 1 }}{% endif %}",
            "- does not apply to a string and a number (line 4 of the template)",
        ),
        (
            "\n{{ nope.deep }}",
            "cannot read the attribute \"deep\" of an undefined value (line 2 of the template)",
        ),
        ("{% if true %}\n", "{% endif %} is missing (line 1 of the template)"),
        ("\n\n{% include 'x' %}", "unexpected {% include %} (line 3 of the template)"),
    ] {
        assert_eq!(render(source).as_ref().map_err(String::as_str), Err(expected));
    }
}
