//! The keys and ranges by which other modules name rows.

/// The key of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TurnKey(pub(crate) i64);

/// A range of session ids that have a common prefix, or no prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionFolder {
    /// All ids come after this one.
    pub(crate) begin: String,
    /// All ids come before this one.
    pub(crate) end: String,
    pub(crate) has_slash: bool,
}

impl SessionFolder {
    /// Returns the folder of the ids that begin with this name and a slash, or, without a name, of the ids
    /// without a slash.
    pub fn of(name: Option<&str>) -> Self {
        match name {
            Some(name) => {
                SessionFolder { begin: format!("{name}/"), end: format!("{name}0"), has_slash: true }
            }
            // Session ids consist of visible ASCII characters.
            None => SessionFolder { begin: String::new(), end: "\u{7f}".to_owned(), has_slash: false },
        }
    }
}
