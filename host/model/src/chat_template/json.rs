//! JSON as Python's `json.dumps` spells it, because models were trained on that.

use serde_json::Value;

/// `", "` and `": "` between things, or an element a line where `indent` is given. Nothing is escaped that need not be.
pub(super) fn dump(value: &Value, indent: Option<usize>) -> String {
    let mut text = String::new();
    write(value, indent, 0, &mut text);
    text
}

fn write(value: &Value, indent: Option<usize>, depth: usize, text: &mut String) {
    match value {
        Value::Array(items) if !items.is_empty() => {
            text.push('[');
            for (index, item) in items.iter().enumerate() {
                separate(index, indent, depth + 1, text);
                write(item, indent, depth + 1, text);
            }
            end_line(indent, depth, text);
            text.push(']');
        }
        Value::Object(fields) if !fields.is_empty() => {
            text.push('{');
            for (index, (key, item)) in fields.iter().enumerate() {
                separate(index, indent, depth + 1, text);
                text.push_str(&Value::from(key.as_str()).to_string());
                text.push_str(": ");
                write(item, indent, depth + 1, text);
            }
            end_line(indent, depth, text);
            text.push('}');
        }
        scalar_or_empty => text.push_str(&scalar_or_empty.to_string()),
    }
}

fn separate(index: usize, indent: Option<usize>, depth: usize, text: &mut String) {
    if index > 0 {
        text.push_str(if indent.is_some() { "," } else { ", " });
    }
    end_line(indent, depth, text);
}

fn end_line(indent: Option<usize>, depth: usize, text: &mut String) {
    if let Some(width) = indent {
        text.push('\n');
        text.extend(std::iter::repeat_n(' ', width * depth));
    }
}
