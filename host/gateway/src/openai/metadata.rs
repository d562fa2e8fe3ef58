//! A client's notes on what it creates.

use crate::ApiError;
use std::collections::BTreeMap;

const MAX_ENTRIES: usize = 16;
const MAX_KEY_CHARS: usize = 64;
const MAX_VALUE_CHARS: usize = 512;

/// Texts by their names.
pub(crate) type Metadata = BTreeMap<String, String>;

/// Checks the bounds of the field `metadata`.
pub(crate) fn checked(given: Option<Metadata>) -> Result<Option<Metadata>, ApiError> {
    let fits = |(key, value): (&String, &String)| {
        key.chars().count() <= MAX_KEY_CHARS && value.chars().count() <= MAX_VALUE_CHARS
    };
    if given.iter().any(|notes| notes.len() > MAX_ENTRIES || !notes.iter().all(fits)) {
        let message = format!(
            "metadata may have {MAX_ENTRIES} entries with keys of {MAX_KEY_CHARS} and values of {MAX_VALUE_CHARS} \
             characters"
        );
        return Err(ApiError::parameter("metadata", message));
    }
    // PostgreSQL stores no such character in what it reads as JSON.
    if given.iter().flatten().any(|(key, value)| key.contains('\0') || value.contains('\0')) {
        return Err(ApiError::parameter("metadata", "metadata must not contain the character U+0000"));
    }
    Ok(given)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_and_the_lengths_of_entries_are_bounded() {
        let entry = |key: usize, value: usize| ("é".repeat(key), "é".repeat(value));
        let is_ok = |notes: Metadata| checked(Some(notes)).is_ok();
        assert!(is_ok(Metadata::from([entry(64, 512)])));
        assert!(!is_ok(Metadata::from([entry(65, 1)])) && !is_ok(Metadata::from([entry(1, 513)])));
        let many = |count: usize| (0..count).map(|index| (index.to_string(), String::new())).collect();
        assert!(is_ok(many(16)) && !is_ok(many(17)));
        assert!(!is_ok(Metadata::from([("a".to_owned(), "x\0".to_owned())])));
        assert_eq!(checked(None).unwrap(), None);
    }
}
