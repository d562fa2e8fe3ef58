//! Amounts of money and currencies.

use serde::{Deserialize, Deserializer, de::Error as _};
use std::{
    fmt,
    ops::{Add, AddAssign, Sub, SubAssign},
    str::FromStr,
};

/// Number of decimals of an amount: a price for a million tokens has up to six decimals.
const DECIMALS: usize = 12;
const ONE: u128 = 10u128.pow(DECIMALS as u32);
/// Maximum number of digits before the point.
const MAX_WHOLE_DIGITS: usize = 12;

/// An amount in some currency, in units of 10⁻¹². Sums saturate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Amount(u128);

/// A currency's code in ISO 4217, such as `USD`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Currency([u8; 3]);

/// An amount with its currency, written as `1.50 USD`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Money {
    pub amount: Amount,
    pub currency: Currency,
}

impl Amount {
    pub(crate) const ZERO: Amount = Amount(0);

    pub(crate) fn of_units(units: u128) -> Self {
        Amount(units)
    }

    pub(crate) fn units(self) -> u128 {
        self.0
    }

    pub(crate) fn saturating_sub(self, other: Amount) -> Amount {
        Amount(self.0.saturating_sub(other.0))
    }

    /// Returns the amount as a number, for comparisons and not for sums.
    pub fn as_f64(self) -> f64 {
        self.0 as f64 / ONE as f64
    }

    /// Returns the amount with at most `decimals` decimals, rounded half up, and at least two.
    pub fn rounded(self, decimals: usize) -> String {
        let decimals = decimals.clamp(2, DECIMALS);
        let unit = 10u128.pow((DECIMALS - decimals) as u32);
        decimal(self.0.saturating_add(unit / 2) / unit * unit)
    }
}

/// Returns the decimal form of an amount, with two decimals or as many as it takes.
fn decimal(units: u128) -> String {
    let fraction = format!("{:012}", units % ONE);
    let fraction = fraction.trim_end_matches('0');
    format!("{}.{fraction:0<2}", units / ONE)
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&decimal(self.0))
    }
}

impl Add for Amount {
    type Output = Amount;
    fn add(self, other: Amount) -> Amount {
        Amount(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Amount {
    fn add_assign(&mut self, other: Amount) {
        *self = *self + other;
    }
}

impl Sub for Amount {
    type Output = Amount;
    /// Subtracts a part of the amount; the rest is never negative.
    fn sub(self, other: Amount) -> Amount {
        self.saturating_sub(other)
    }
}

impl SubAssign for Amount {
    fn sub_assign(&mut self, other: Amount) {
        *self = *self - other;
    }
}

impl FromStr for Amount {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let units = parse_decimal(text, DECIMALS)?;
        Ok(Amount(units))
    }
}

/// Parses a decimal number into units of 10^-`decimals`, without rounding.
pub(super) fn parse_decimal(text: &str, decimals: usize) -> Result<u128, String> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    let shown: String = text.chars().take(40).collect();
    if !is_number(whole) || !is_number(fraction) {
        return Err(format!("{shown:?} is not a decimal number such as 0.60"));
    }
    let fraction = fraction.trim_end_matches('0');
    if fraction.len() > decimals {
        return Err(format!("{shown} has more than {decimals} decimals"));
    }
    let whole = whole.trim_start_matches('0');
    if whole.len() > MAX_WHOLE_DIGITS {
        return Err(format!(
            "{shown} is too large; a number has at most {MAX_WHOLE_DIGITS} digits before the point"
        ));
    }
    let digits = format!("{whole}{fraction:0<decimals$}");
    Ok(digits.parse().unwrap_or(0))
}

impl fmt::Display for Currency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(str::from_utf8(&self.0).unwrap_or("???"))
    }
}

impl FromStr for Currency {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match <[u8; 3]>::try_from(text.as_bytes()) {
            Ok(letters) if letters.iter().all(u8::is_ascii_uppercase) => Ok(Currency(letters)),
            _ => {
                let shown: String = text.chars().take(20).collect();
                Err(format!("{shown:?} is not a currency; write its three letters, such as \"USD\""))
            }
        }
    }
}

impl<'de> Deserialize<'de> for Currency {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        String::deserialize(reader)?.parse().map_err(D::Error::custom)
    }
}

impl fmt::Display for Money {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.amount, self.currency)
    }
}

impl FromStr for Money {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (amount, currency) = text
            .trim()
            .split_once(' ')
            .ok_or_else(|| "write the amount and its currency, such as \"1.50 USD\"".to_owned())?;
        let money = Money { amount: amount.parse()?, currency: currency.trim().parse()? };
        match money.amount == Amount::ZERO {
            true => Err("the amount must be more than 0".to_owned()),
            false => Ok(money),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_exact_and_read_what_they_print() {
        for (text, printed) in [
            ("1.5", "1.50"),
            ("0", "0.00"),
            ("007.100", "7.10"),
            ("0.000000000001", "0.000000000001"),
            ("999999999999.999999999999", "999999999999.999999999999"),
        ] {
            let amount: Amount = text.parse().expect(text);
            assert_eq!(amount.to_string(), printed);
            assert_eq!(printed.parse::<Amount>(), Ok(amount));
        }
        for (text, why) in [
            ("", "is not a decimal number"),
            ("-1", "is not a decimal number"),
            (".5", "is not a decimal number"),
            ("1.", "is not a decimal number"),
            ("1e3", "is not a decimal number"),
            ("0.0000000000001", "has more than 12 decimals"),
            ("1000000000000", "is too large"),
        ] {
            let error = text.parse::<Amount>().expect_err(text);
            assert!(error.contains(why), "{error}");
        }
        let amount: Amount = "1.2345675".parse().expect("a number");
        assert_eq!([amount.rounded(6), amount.rounded(4), amount.rounded(0)], ["1.234568", "1.2346", "1.23"]);
        assert_eq!("0.995".parse::<Amount>().expect("a number").rounded(2), "1.00");
    }

    #[test]
    fn money_has_an_amount_and_a_currency() {
        let money: Money = "1.50 USD".parse().expect("money");
        assert_eq!(money.to_string(), "1.50 USD");
        for (text, why) in [
            ("1.50", "such as \"1.50 USD\""),
            ("1.50 usd", "three letters"),
            ("1.50 DOLLAR", "three letters"),
            ("0 USD", "more than 0"),
            ("x USD", "is not a decimal number"),
        ] {
            let error = text.parse::<Money>().expect_err(text);
            assert!(error.contains(why), "{error}");
        }
    }
}
