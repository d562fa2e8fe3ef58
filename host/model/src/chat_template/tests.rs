//! Templates of the kinds that models bring, and hostile ones.

use super::*;
use serde_json::json;

fn render(source: &str, messages: serde_json::Value) -> Result<String, ModelError> {
    let template = ChatTemplate::new(source, Some("<s>".into()), Some("</s>".into()))?;
    template.render(messages.as_array().expect("a list"), None, true)
}

#[test]
fn chatml_renders_roles_in_turn() {
    let messages = [json!({"role": "system", "content": "Be kind."}), json!({"role": "user", "content": "Hi <b>"})];
    let text = ChatTemplate::chatml_default().render(&messages, None, true).unwrap();
    let expected = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n";
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
fn a_templates_own_complaint_is_told() {
    let error = render("{{ raise_exception('roles must alternate') }}", json!([])).unwrap_err().to_string();
    assert!(error.contains("roles must alternate"), "{error}");
}

#[test]
fn broken_and_endless_templates_are_errors() {
    assert!(ChatTemplate::new("{% for x in %}", None, None).is_err());
    assert!(ChatTemplate::new(&" ".repeat(MAX_SOURCE_BYTES + 1), None, None).is_err());
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}";
    let error = render(endless, json!([])).unwrap_err().to_string();
    assert!(error.contains("steps"), "{error}");
    let recursive = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
    assert!(render(recursive, json!([])).is_err());
}
