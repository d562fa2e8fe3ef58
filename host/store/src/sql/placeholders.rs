//! Translation of placeholders.

/// Replaces SQLite's placeholders by PostgreSQL's. As in SQLite, `?` has the number after the highest one before it.
pub(super) fn to_postgres(sql: &str) -> String {
    let mut translated = String::with_capacity(sql.len() + 16);
    let (mut rest, mut highest) = (sql, 0);
    while let Some(at) = rest.find(['?', '\'']) {
        translated.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        if rest.as_bytes()[at] == b'\'' {
            // A quoted quote ends one literal and begins the next, which is just as well here.
            let end = after.find('\'').map_or(after.len(), |end| end + 1);
            translated.push('\'');
            translated.push_str(&after[..end]);
            rest = &after[end..];
            continue;
        }
        let digits = after.bytes().take_while(u8::is_ascii_digit).count();
        let number = after[..digits].parse().unwrap_or(highest + 1);
        highest = highest.max(number);
        translated.push('$');
        translated.push_str(&number.to_string());
        rest = &after[digits..];
    }
    translated.push_str(rest);
    translated
}

#[cfg(test)]
mod tests {
    use super::to_postgres;

    #[test]
    fn placeholders_get_the_numbers_that_sqlite_gives_them() {
        for (sqlite, postgres) in [
            ("SELECT 1", "SELECT 1"),
            ("a = ? AND b = ?", "a = $1 AND b = $2"),
            ("a = ?2 AND b = ?1 AND c = ?", "a = $2 AND b = $1 AND c = $3"),
            ("a = ?12", "a = $12"),
            ("a = 'why?' AND b = ?", "a = 'why?' AND b = $1"),
            ("a = 'it''s ?' || ? || '/'", "a = 'it''s ?' || $1 || '/'"),
        ] {
            assert_eq!(to_postgres(sqlite), postgres, "{sqlite}");
        }
    }
}
