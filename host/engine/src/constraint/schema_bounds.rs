//! Checks before compiling, against schemas of a few bytes that blow up into something large. A schema that
//! passes is not necessarily supported; for one that fails, finding out would take too much time or memory.

use serde_json::Value;

const MAX_DEPTH: usize = 64;
const MAX_VALUES: usize = 20_000;
/// Maximum number of repetitions that one keyword or quantifier may request.
pub(super) const MAX_REPETITIONS: u64 = 10_000;

/// Checks the nesting and size of a JSON Schema. llguidance's own option key is refused: it could switch checks
/// off.
pub(super) fn check_size(schema: &Value) -> Result<(), String> {
    if schema.get("x-guidance").is_some() {
        return Err("the keyword `x-guidance` at `/x-guidance` is not allowed".to_string());
    }
    let mut values = 0;
    check_value(schema, 0, &mut values)
}

fn check_value(value: &Value, depth: usize, values: &mut usize) -> Result<(), String> {
    *values += 1;
    if depth > MAX_DEPTH {
        return Err(format!("the schema is nested more than {MAX_DEPTH} levels deep"));
    }
    if *values > MAX_VALUES {
        return Err(format!("the schema has more than {MAX_VALUES} values"));
    }
    match value {
        Value::Array(items) => items.iter().try_for_each(|item| check_value(item, depth + 1, values)),
        Value::Object(members) => {
            members.values().try_for_each(|member| check_value(member, depth + 1, values))
        }
        _ => Ok(()),
    }
}

/// Checks the nesting and the repetition counts of a regular expression.
pub(super) fn check_pattern(pattern: &str) -> Result<(), String> {
    check_nesting(pattern)?;
    check_repetitions(pattern)
}

/// Returns whether a regular expression contains no character that JSON can only write as `\u…`.
pub(super) fn spells_no_control(pattern: &str) -> bool {
    let mut rest = pattern;
    while let Some((before, after)) = rest.split_once('\\') {
        let code = match after.as_bytes() {
            [b'x', ..] => after.get(1..3),
            [b'u', ..] => after.get(1..5),
            _ => None,
        };
        let code = code.and_then(|digits| u32::from_str_radix(digits, 16).ok());
        let is_control = |code: u32| (code < 0x20 || code == 0x7F) && !matches!(code, 8..=10 | 12 | 13);
        if code.is_some_and(is_control)
            || after.starts_with(['v', 'a', 'c', '0'])
            || before.contains(|c: char| c.is_ascii_control())
            || after.starts_with("x{")
            || after.starts_with("u{")
        {
            return false;
        }
        let mut escaped = after.chars();
        escaped.next();
        rest = escaped.as_str();
    }
    !rest.contains(|c: char| c.is_ascii_control())
}

/// Checks the nesting and the repetition counts of a grammar.
pub(super) fn check_grammar(source: &str) -> Result<(), String> {
    check_nesting(source)?;
    check_repetitions(source)
}

/// Checks the nesting of brackets. Quoting and classes are ignored, so the bound is generous.
pub(super) fn check_nesting(source: &str) -> Result<(), String> {
    let (mut depth, mut escaped) = (0usize, false);
    for byte in source.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > 2 * MAX_DEPTH {
            return Err(format!("brackets are nested more than {} levels deep", 2 * MAX_DEPTH));
        }
    }
    Ok(())
}

/// Checks every `{n}`, `{n,}`, `{n,m}`. Nested ones multiply; the compiler's fuel bounds their product.
fn check_repetitions(source: &str) -> Result<(), String> {
    for piece in source.split('{').skip(1) {
        let Some((inside, _)) = piece.split_once('}') else { continue };
        if !inside.bytes().all(|byte| byte.is_ascii_digit() || byte == b',' || byte == b' ') {
            continue;
        }
        for number in inside.split(',').map(str::trim).filter(|number| !number.is_empty()) {
            if number.parse::<u64>().map_or(true, |n| n > MAX_REPETITIONS) {
                return Err(format!("{{{inside}}} repeats more than {MAX_REPETITIONS} times"));
            }
        }
    }
    Ok(())
}
