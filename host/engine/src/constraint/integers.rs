//! Regular expressions for ranges of whole numbers.

use serde_json::Value;

use super::schema_keywords::Members;

/// Returns a pattern for the whole numbers within a schema's bounds; `None` if there are none, or more than 64
/// bits hold.
pub(super) fn range_of(members: &Members) -> Option<String> {
    let bound = |key: &str| members.get(key).and_then(Value::as_f64);
    let exact = |bound: f64| (bound.abs() <= 9.1e18).then_some(bound as i64);
    let mut least = i64::MIN + 1;
    let mut most = i64::MAX;
    if let Some(bound) = bound("minimum") {
        least = least.max(exact(bound.ceil())?);
    }
    if let Some(bound) = bound("exclusiveMinimum") {
        least = least.max(exact(bound.floor())?.checked_add(1)?);
    }
    if let Some(bound) = bound("maximum") {
        most = most.min(exact(bound.floor())?);
    }
    if let Some(bound) = bound("exclusiveMaximum") {
        most = most.min(exact(bound.ceil())?.checked_sub(1)?);
    }
    range(least, most)
}

/// Returns a pattern for every number from `least` to `most`, in its shortest form.
fn range(least: i64, most: i64) -> Option<String> {
    if least > most || least == i64::MIN {
        return None;
    }
    let mut ways = Vec::new();
    if least < 0 {
        let (near, far) = (if most < 0 { -most } else { 1 }, -least);
        ways.push(format!("-({})", natural(near as u64, far as u64).join("|")));
    }
    if most >= 0 {
        ways.extend(natural(least.max(0) as u64, most as u64));
    }
    Some(format!("({})", ways.join("|")))
}

/// Returns alternatives for the numbers from `least` to `most`, by their number of digits.
fn natural(least: u64, most: u64) -> Vec<String> {
    let mut ways = Vec::new();
    let mut from = least;
    loop {
        let digits = from.to_string().len() as u32;
        let last = 10_u64.checked_pow(digits).map_or(u64::MAX, |next| next - 1).min(most);
        ways.push(same_length(from.to_string().as_bytes(), last.to_string().as_bytes()));
        if last >= most {
            return ways;
        }
        from = last + 1;
    }
}

/// Returns a pattern for a range whose ends have the same number of digits.
fn same_length(least: &[u8], most: &[u8]) -> String {
    let (Some((&low, below)), Some((&high, above))) = (least.split_first(), most.split_first()) else {
        return String::new();
    };
    let rest = below.len();
    if low == high {
        return format!("{}{}", char::from(low), same_length(below, above));
    }
    let (is_lowest, is_highest) = (below.iter().all(|d| *d == b'0'), above.iter().all(|d| *d == b'9'));
    let mut ways = Vec::new();
    if !is_lowest {
        ways.push(format!("{}{}", char::from(low), same_length(below, &vec![b'9'; rest])));
    }
    let first = if is_lowest { low } else { low + 1 };
    let last = if is_highest { high } else { high - 1 };
    if first <= last {
        let any = if rest == 0 { String::new() } else { format!("[0-9]{{{rest}}}") };
        ways.push(format!("[{}-{}]{any}", char::from(first), char::from(last)));
    }
    if !is_highest {
        ways.push(format!("{}{}", char::from(high), same_length(&vec![b'0'; rest], above)));
    }
    format!("({})", ways.join("|"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, number: i64) -> bool {
        let schema = serde_json::json!({"pattern": format!("^{pattern}$")});
        jsonschema::validator_for(&schema).unwrap().is_valid(&number.to_string().into())
    }

    #[test]
    fn a_range_matches_exactly_its_numbers() {
        for (least, most) in [(0, 0), (-3, 12), (7, 7), (10, 1000), (-120, -9), (99, 101), (1, 365)] {
            let pattern = range(least, most).unwrap();
            for number in least - 130..most + 130 {
                assert_eq!(
                    matches(&pattern, number),
                    (least..=most).contains(&number),
                    "{number} in {pattern}"
                );
            }
        }
        let widest = range(-9_000_000_000_000_000_000, 9_000_000_000_000_000_000).unwrap();
        for (number, is_within) in
            [(i64::MAX, false), (9_000_000_000_000_000_000, true), (-1, true), (0, true)]
        {
            assert_eq!(matches(&widest, number), is_within, "{number}");
        }
        assert_eq!(range(3, 2), None);
    }
}
