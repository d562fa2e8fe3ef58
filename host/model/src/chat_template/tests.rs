//! Tests with templates of the kinds that models have, and with hostile ones.

use super::*;
use serde_json::json;

fn render(source: &str, messages: serde_json::Value) -> Result<String, ModelError> {
    let template = ChatTemplate::new(source, Some("<s>".into()), Some("</s>".into()))?;
    template.render(messages.as_array().expect("a list"), None, true)
}

#[test]
fn chatml_renders_roles_in_turn() {
    let messages =
        [json!({"role": "system", "content": "Be kind."}), json!({"role": "user", "content": "Hi <b>"})];
    let text = ChatTemplate::chatml_default().render(&messages, None, true).unwrap();
    let expected =
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(text, expected);
}

#[test]
fn python_methods_blocks_and_loop_controls_work() {
    let source = "{{ bos_token }}{%- for m in messages if m.role != 'tool' %}\n  {%- if loop.first %}\n    {% set ns = namespace(n=1) %}\n  {%- endif %}\n{{ m['content'].strip().upper().split(' ')[-1] }}{% if m.content.startswith('stop') %}{% break %}{% endif %}\n{%- endfor %}{{ eos_token }}";
    let messages = json!([{"role": "user", "content": " a b "}, {"role": "tool", "content": "x"},
        {"role": "user", "content": "stop now"}, {"role": "user", "content": "never"}]);
    assert_eq!(render(source, messages).unwrap(), "<s>BNOW</s>");
}

#[test]
fn tools_are_shown_in_pythons_json() {
    let source = "{% for tool in tools %}{{ tool | tojson }}|{{ tool | tojson(indent=2) }}{% endfor %}";
    let template = ChatTemplate::new(source, None, None).unwrap();
    let tools = json!([{"name": "f<é>", "n": [1, 2.5, true, null], "empty": {}}]);
    let text = template.render(&[], Some(&tools), false).unwrap();
    let line = r#"{"name": "f<é>", "n": [1, 2.5, true, null], "empty": {}}"#;
    let lines = "{\n  \"name\": \"f<é>\",\n  \"n\": [\n    1,\n    2.5,\n    true,\n    null\n  ],\n  \"empty\": {}\n}";
    assert_eq!(text, format!("{line}|{lines}"));
    assert!(template.knows_tools() && !ChatTemplate::chatml_default().knows_tools());
}

#[test]
fn generation_tags_are_tolerated() {
    let source = "{% for m in messages %}{%- generation -%}{{ m.content }}{% endgeneration %}{% endfor %}";
    assert_eq!(render(source, json!([{"role": "user", "content": "x"}])).unwrap(), "x");
}

#[test]
fn reports_an_exception_raised_by_the_template() {
    let error = render("{{ raise_exception('roles must alternate') }}", json!([])).unwrap_err().to_string();
    assert!(error.contains("roles must alternate"), "{error}");
}

#[test]
fn broken_and_endless_templates_are_errors() {
    assert!(ChatTemplate::new("{% for x in %}", None, None).is_err());
    assert!(ChatTemplate::new(&" ".repeat(MAX_SOURCE_BYTES + 1), None, None).is_err());
    let endless = "{% set r = range(9999) %}{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}";
    let error = render(endless, json!([])).unwrap_err().to_string();
    assert!(error.contains("steps"), "{error}");
    let recursive = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
    assert!(render(recursive, json!([])).is_err());
}

#[test]
fn none_is_not_iterable_and_errors_do_not_quote_the_conversation() {
    let source = "{% if tools is iterable and tools | length > 0 %}yes{% else %}no{% endif %}";
    assert_eq!(render(source, json!([])).unwrap(), "no");
    let error =
        render("{{ messages[0].content | length - none }}", json!([{"content": "my secret"}])).unwrap_err();
    assert!(!error.to_string().contains("my secret"), "{error}");
}

/// Modeled on Llama 3.1: tools in the first user turn, the date, the arguments as `parameters`.
#[test]
fn a_llama_style_template_renders_calls_and_results() {
    let source = r#"{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") | length %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|h|>system<|/h|>\n\n" + system + "\nToday: " ~ date_string + "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|h|>' + message['role'] + '<|/h|>\n\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("one call at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|h|>assistant<|/h|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot|>" }}
    {%- elif message.content is mapping or message.content is iterable and message.content is not string %}
        {{- message.content | tojson }}
    {%- else %}
        {{- "<|h|>tool<|/h|>\n\n" + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|h|>assistant<|/h|>\n\n' }}
{%- endif %}
"#;
    let call = json!({"id": "1", "function": {"name": "find", "arguments": {"id": "é", "n": 3}}});
    let messages = json!([
        {"role": "system", "content": " Be kind. "},
        {"role": "user", "content": "Hi\n"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": {"state": "sent"}},
        {"role": "tool", "content": "done"}
    ]);
    let expected = "<s><|h|>system<|/h|>\n\nBe kind.\nToday: 11<|eot|><|h|>user<|/h|>\n\nHi<|eot|><|h|>assistant<|/h|>\n\n{\"name\": \"find\", \"parameters\": {\"id\": \"é\", \"n\": 3}}<|eot|>{\"state\": \"sent\"}<|h|>tool<|/h|>\n\ndone<|h|>assistant<|/h|>\n\n";
    assert_eq!(render(source, messages).unwrap(), expected);
}

/// Modeled on Qwen 3: walks backward to the last question and removes thoughts from earlier answers.
#[test]
fn a_qwen_style_template_removes_earlier_thoughts() {
    let source = r#"{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and not message.content.startswith('<result>') %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if '</think>' in content %}
        {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {%- if loop.index0 > ns.last and thought is defined %}
        {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
    {%- endif %}
    {{- message.role ~ ': ' ~ content }}{{ '\n' if not loop.last else '' }}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}never{% endif %}"#;
    let answer = "<think>\nhm\n</think>\n\nyes";
    let messages = json!([
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "<result>1</result>"}
    ]);
    let expected =
        "user: a\nassistant: yes\nuser: b\n<think>\nhm\n</think>\n\nassistant: yes\nuser: <result>1</result>";
    assert_eq!(render(source, messages).unwrap(), expected);
}

/// Each of these creates a value that doubles sixty times or nests without end.
const HOSTILE: [&str; 22] = [
    "{% set ns.x = ns.x + ns.x %}",
    "{% set ns.x = ns.x ~ ns.x %}",
    "{% set ns.x = ns.x * 9 %}",
    "{% set ns.x = [ns.x, ns.x] %}{% set y = ns.x | string %}",
    "{% set ns.x = [ns.x, ns.x] %}{% set y = ns.x | tojson(indent=9) %}",
    "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% set y = ns.x == ns.x %}",
    "{% set ns.x = (ns.x | list + ns.x | list) | join %}",
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}",
    "{% set ns.x = ns.x | replace('a', 'aa') %}",
    "{% set ns.x = ns.x.replace('', ns.x) %}",
    "{% set ns.x = [ns.x, ns.x] | join(ns.x) %}",
    "{% set ns.x = '%s%s' | format(ns.x, ns.x) %}",
    "{% set ns.x = '{0}{0}'.format(ns.x) %}",
    "{% set ns.x = ns.x | indent(1000000) | indent(ns.x, true) %}",
    "{% set ns.x = ns.x | batch(99999999999, 'a') | list | join %}",
    "{% set ns.x = ns.x[0:] ~ ns.x[::-1] %}",
    "{% set ns.x = ns.x | upper | lower ~ ns.x | title %}",
    "{% set ns.x = [ns.x, ns.x] | map('replace', 'a', ns.x) | join %}",
    "{% set ns.x = (ns.x ~ ns.x) | e %}",
    "{{ ns.x * 99999999999999 }}",
    "{{ double('a') }}",
    "{% for y in [1] recursive %}{{ loop([1]) }}{% endfor %}",
];

/// Runs the test in a separate process whose address space the operating system limits.
#[cfg(target_os = "linux")]
#[test]
fn hostile_templates_stay_within_memory_and_time_limits() {
    const ADDRESS_SPACE_KIB: u32 = 768 << 10;
    let test = "chat_template::tests::hostile_templates_are_errors_in_seconds";
    let limited = format!("ulimit -v {ADDRESS_SPACE_KIB} && exec \"$0\" --exact {test} --test-threads 1");
    let program = std::env::current_exe().expect("the path of the test binary");
    let output =
        std::process::Command::new("sh").arg("-c").arg(limited).arg(program).output().expect("sh must start");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn hostile_templates_are_errors_in_seconds() {
    for hostile in HOSTILE {
        let source = format!(
            "{{% macro double(x) %}}{{{{ double(x ~ x) }}}}{{% endmacro %}}{{% set ns = namespace(x='ab') %}}\
             {{% for i in range(60) %}}{hostile}{{% endfor %}}{{{{ ns.x }}}}"
        );
        let begun = std::time::Instant::now();
        let error = render(&source, json!([])).expect_err(hostile).to_string();
        let bounds = ["bytes of texts and lists", "steps", "nest deeper"];
        assert!(bounds.iter().any(|bound| error.contains(bound)), "{hostile}: {error}");
        assert!(begun.elapsed() < std::time::Duration::from_secs(20), "{hostile}: {:?}", begun.elapsed());
    }
}

#[test]
fn a_long_conversation_is_within_the_limits() {
    let messages: Vec<_> = (0..10_000)
        .map(|turn| json!({"role": "user", "content": format!("{turn} {}", "word ".repeat(200))}))
        .collect();
    let source = "{% set ns = namespace(n=0) %}{% for m in messages %}{% set c = m.content.strip().split('</think>')[-1].lstrip('\n') %}\
        {{ '<|' + m.role + '|>\n' + c + '<|end|>\n' }}{% set ns.n = ns.n + c | length %}{% endfor %}{{ ns.n }}";
    let text = ChatTemplate::new(source, None, None).unwrap().render(&messages, None, true).unwrap();
    assert!(text.len() > 10_000_000 && text.ends_with("10038890"), "{}", &text[text.len() - 20..]);
}

/// Nested syntax must be rejected; long chains without nesting must not.
#[test]
fn rejects_deep_syntax_and_accepts_long_syntax() {
    for (open, close) in
        [("(", ")"), ("[", "]"), ("{1:", "}"), ("not ", ""), ("-", ""), ("1 if 1 else ", ""), ("f(", ")")]
    {
        let source = format!("{{{{ {}1{} }}}}", open.repeat(50_000), close.repeat(50_000));
        let error = ChatTemplate::new(&source, None, None).expect_err(open).to_string();
        assert!(error.contains("nests deeper"), "{error}");
    }
    for open in ["{% if 1 %}", "{% for x in [1] %}", "{% macro f() %}", "{% generation %}"] {
        let error = ChatTemplate::new(&open.repeat(20_000), None, None).expect_err(open).to_string();
        assert!(error.contains("nests deeper"), "{error}");
    }
    for (link, expected) in
        [("+1", "20001"), (" is defined", "True"), ("|abs", "1"), (" and 1", "1"), ("<2", "False")]
    {
        let source = format!("{{{{ 1{} }}}}", link.repeat(20_000));
        assert_eq!(render(&source, json!([])).unwrap(), expected, "{link}");
    }
    let branches = format!("{{% if 0 %}}{}{{% else %}}x{{% endif %}}", "{% elif 0 %}".repeat(20_000));
    assert_eq!(render(&branches, json!([])).unwrap(), "x");
}
