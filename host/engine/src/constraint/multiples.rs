//! Checks that the `multipleOf`s of a document are within the range that the compiler can compute with: it
//! multiplies in 32 bits where several of them meet.

use serde_json::Value;

/// Returns whether every `multipleOf` fits. Numbers in data are checked too, which only makes the check stricter.
pub(super) fn fit(schema: &Value) -> bool {
    let mut found = Vec::new();
    collect(schema, &mut found);
    found.sort_by(f64::total_cmp);
    found.dedup();
    let mut whole = Vec::new();
    for number in found {
        let micros = (number * 1e6).round();
        let exact = (micros / 1e6 - number).abs() <= number * 1e-12;
        if micros < 1.0 || !exact || number > f64::from(u32::MAX) {
            return false;
        }
        whole.push(micros as u128);
    }
    if whole.len() < 2 {
        return true;
    }
    let scale = whole.iter().fold(1_000_000_u128, |scale, micros| gcd(scale, *micros));
    let (mut least, mut largest) = (1_u128, 1);
    whole.iter().all(|micros| {
        let step = micros / scale;
        largest = step.max(largest);
        least = least / gcd(least, step) * step;
        least * largest <= u128::from(u32::MAX)
    })
}

fn collect(value: &Value, found: &mut Vec<f64>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| collect(item, found)),
        Value::Object(members) => {
            found.extend(members.get("multipleOf").and_then(Value::as_f64));
            members.values().for_each(|member| collect(member, found));
        }
        _ => {}
    }
}

fn gcd(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn multiples_past_the_compilers_arithmetic_do_not_fit() {
        let schema =
            |multiples: &[f64]| json!(multiples.iter().map(|m| json!({"multipleOf": m})).collect::<Vec<_>>());
        assert!(fit(&schema(&[2.0, 5.0, 0.01])) && fit(&schema(&[12.345])));
        assert!(!fit(&schema(&[1e-300])) && !fit(&schema(&[0.1234567])) && !fit(&schema(&[1e10])));
        assert!(!fit(&schema(&[0.001, 999_983.0])));
    }
}
