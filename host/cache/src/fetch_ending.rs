//! Ends of fetches of pages that other hosts or a cluster cache have.

/// The end of a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchEnding {
    /// All pages that the source said it had have come.
    Fetched,
    /// No source has the pages.
    Absent,
    /// Too many fetches are under way.
    Busy,
    /// The source took too long.
    Late,
    /// The source refused, the connection broke, or a call failed.
    Broken,
    /// A page was not the one that was asked for.
    Rejected,
    /// A page was gone or damaged when it was to be read.
    Cut,
    /// The request ended, or did not want to wait longer.
    Unwanted,
}

impl FetchEnding {
    /// All of them, for metrics that are visible from the start.
    pub const ALL: [FetchEnding; 8] = [
        FetchEnding::Fetched,
        FetchEnding::Absent,
        FetchEnding::Busy,
        FetchEnding::Late,
        FetchEnding::Broken,
        FetchEnding::Rejected,
        FetchEnding::Cut,
        FetchEnding::Unwanted,
    ];

    /// Returns the label of metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            FetchEnding::Fetched => "fetched",
            FetchEnding::Absent => "absent",
            FetchEnding::Busy => "busy",
            FetchEnding::Late => "late",
            FetchEnding::Broken => "broken",
            FetchEnding::Rejected => "rejected",
            FetchEnding::Cut => "cut",
            FetchEnding::Unwanted => "unwanted",
        }
    }
}
