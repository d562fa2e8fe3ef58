//! The fraction of a device's memory that a model may take, for devices that it shares with other programs.

use std::fmt;
use std::str::FromStr;

/// A fraction of a device's memory from 0.1 to 1, in thousandths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryFraction(u16);

impl MemoryFraction {
    /// Returns the fraction, rounded to thousandths, or an error if it is out of range.
    pub fn new(fraction: f64) -> Result<Self, String> {
        match (0.1..=1.0).contains(&fraction) {
            true => Ok(MemoryFraction((fraction * 1e3).round() as u16)),
            false => {
                Err(format!("{fraction} is out of range; a fraction of a device's memory is from 0.1 to 1"))
            }
        }
    }

    /// Returns this fraction of a number of bytes.
    pub fn of(self, bytes: u64) -> u64 {
        // The quotient comes first, so that no number overflows.
        bytes / 1000 * u64::from(self.0) + bytes % 1000 * u64::from(self.0) / 1000
    }
}

impl fmt::Display for MemoryFraction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", f64::from(self.0) / 1e3)
    }
}

impl FromStr for MemoryFraction {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fraction = text.parse::<f64>();
        Self::new(fraction.map_err(|_| format!("{text:?} is not a number; expected a fraction such as 0.5"))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fraction_is_read_shown_and_taken_of_any_size() {
        for (text, bytes, part) in
            [("0.5", 1001, 500), ("1", u64::MAX, u64::MAX), ("0.1", 79, 7), ("0.125", 80 << 30, 10 << 30)]
        {
            let fraction: MemoryFraction = text.parse().unwrap();
            assert_eq!((fraction.to_string().as_str(), fraction.of(bytes)), (text, part));
        }
        for (text, expected) in [
            ("0.05", "0.05 is out of range"),
            ("1.1", "from 0.1 to 1"),
            ("NaN", "NaN is"),
            ("half", "such as 0.5"),
        ] {
            let error = text.parse::<MemoryFraction>().unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
