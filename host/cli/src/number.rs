//! Numbers in `skep.toml` with their bounds, so that a value that cannot work is an error where it is
//! written.

use std::fmt;

use serde::Deserialize;
use serde::de::value::U64Deserializer;
use serde::de::{Deserializer, Error, IntoDeserializer as _, Visitor};

/// Reads a number; for `#[serde(deserialize_with = "number::<LEAST, MOST, _, _>")]`. All numbers in the range
/// must be values of `T`.
pub(super) fn number<'de, const LEAST: u64, const MOST: u64, T, D>(reader: D) -> Result<Option<T>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    let number: U64Deserializer<D::Error> =
        reader.deserialize_i64(InRange::<LEAST, MOST>)?.into_deserializer();
    T::deserialize(number).map(Some)
}

struct InRange<const LEAST: u64, const MOST: u64>;

impl<const LEAST: u64, const MOST: u64> Visitor<'_> for InRange<LEAST, MOST> {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a whole number from {LEAST} to {MOST}")
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<u64, E> {
        match u64::try_from(number) {
            Ok(number) if (LEAST..=MOST).contains(&number) => Ok(number),
            _ => Err(E::custom(format_args!(
                "{number} is out of range; it must be between {LEAST} and {MOST}"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    struct Some3 {
        #[serde(deserialize_with = "number::<1, 3, _, _>")]
        some: Option<NonZeroUsize>,
    }

    #[test]
    fn only_a_number_in_range_is_accepted_and_an_error_names_the_range() {
        let read = |value: &str| skep_runtime::parse_toml::<Some3>(&format!("some = {value}"));
        assert_eq!(read("3"), Ok(Some3 { some: NonZeroUsize::new(3) }));
        for (value, expected) in [
            ("0", "line 1: some: 0 is out of range; it must be between 1 and 3"),
            ("4", "line 1: some: 4 is out of range; it must be between 1 and 3"),
            ("-1", "line 1: some: -1 is out of range; it must be between 1 and 3"),
            ("1.5", "line 1: some: invalid type: floating point `1.5`, expected a whole number from 1 to 3"),
            ("\"2\"", "line 1: some: invalid type: string \"2\", expected a whole number from 1 to 3"),
        ] {
            assert_eq!(read(value).expect_err(value), expected);
        }
    }
}
