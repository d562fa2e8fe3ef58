//! Decides which values are strong enough to be secrets: those that cannot be guessed.
//!
//! Values are searched for in responses and redacted. A short or common value would match unrelated text, and an
//! observer of the redactions could guess it.

/// Minimum length of a secret; shorter ones can be guessed.
const MIN_SECRET_BYTES: usize = 12;
const MAX_SECRET_BYTES: usize = 4 << 10;
/// Minimum entropy by the estimate of [`bits`]; twelve random letters have 40.
const MIN_BITS: f64 = 30.0;
/// Words that people and manuals write in place of a secret.
const COMMON: [&str; 16] = [
    "password",
    "passwort",
    "passw0rd",
    "changeme",
    "letmein",
    "welcome",
    "qwertyuiop",
    "qwerty",
    "asdfgh",
    "secret",
    "example",
    "default",
    "admin",
    "replace",
    "token",
    "test",
];

/// Checks that a value is strong enough to be a secret. The error says why it is not and what to do, and does not
/// quote the value.
pub fn check_secret_value(value: &str) -> Result<(), String> {
    let bytes = value.len();
    if !(MIN_SECRET_BYTES..=MAX_SECRET_BYTES).contains(&bytes) {
        return Err(format!(
            "its value has {bytes} bytes; it must have {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}, because a short one can be \
             guessed; use a longer key or password"
        ));
    }
    if bits(value) < MIN_BITS {
        return Err("its value can be guessed: it repeats itself, counts up or consists of common words; generate a random \
                    one, for example with `openssl rand -hex 16`"
            .to_owned());
    }
    Ok(())
}

/// Estimates the number of bits to guess, by the Shannon entropy of the characters. Repetitions and characters that
/// count up or down from the previous one add nothing, and neither does a common word.
fn bits(value: &str) -> f64 {
    let mut text = value.to_lowercase();
    for word in COMMON {
        text = text.replace(word, "");
    }
    let characters: Vec<char> = text.chars().collect();
    let characters = &characters[..period(&characters)];
    let mut counts = std::collections::HashMap::<char, u32>::new();
    let mut before = None;
    for character in characters.iter().copied() {
        let continues_run =
            before.is_some_and(|before| u32::from(character).abs_diff(u32::from(before)) <= 1);
        if !continues_run {
            *counts.entry(character).or_default() += 1;
        }
        before = Some(character);
    }
    let all = f64::from(counts.values().sum::<u32>());
    counts.into_values().map(f64::from).map(|count| count * (all / count).log2()).sum()
}

/// Returns the length of the shortest prefix whose repetition makes up the text.
fn period(characters: &[char]) -> usize {
    let is_period = |length: &usize| characters.iter().skip(*length).zip(characters).all(|(a, b)| a == b);
    (1..characters.len()).find(is_period).unwrap_or(characters.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_keys_that_services_issue() {
        for value in [
            "sk_live_4eC39HqLyjWDarjtT1zdp7dc",
            "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
            "9f86d081884c7d659a2feaa0c55ad015",
            "xoxb-17653672481-19874698323-pdFZKVeTuE8sk7oOcHrzqqgy",
            "eyJhbGciOiJIUzI1NiJ9.e30.ZRrHA1JJJW8opsbCGfG_HACGpVUMN_a9IDdQ7",
            "s3cret-value",
            "correct-horse-battery",
            "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC",
            "пароль-с-буквами",
        ] {
            assert_eq!(check_secret_value(value), Ok(()), "{value}");
        }
    }

    #[test]
    fn rejects_short_and_guessable_values_without_quoting_them() {
        for (value, said) in [
            ("", "0 bytes"),
            ("k3y-v4lue!x", "11 bytes"),
            ("aaaaaaaaaaaaaaaa", "can be guessed"),
            ("abcdefghijklmnop", "can be guessed"),
            ("1234567890123456", "can be guessed"),
            ("9876543210987", "can be guessed"),
            ("abababababababab", "can be guessed"),
            ("x7Kx7Kx7Kx7Kx7K", "can be guessed"),
            ("password1234", "can be guessed"),
            ("Changeme-changeme", "can be guessed"),
            ("test-test-test", "can be guessed"),
            (&"k3".repeat(4_000), "8000 bytes"),
        ] {
            let error = check_secret_value(value).expect_err(value);
            assert!(error.contains(said) && (value.is_empty() || !error.contains(value)), "{value}: {error}");
        }
    }
}
