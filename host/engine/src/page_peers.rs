//! Other hosts that may have pages which this one lacks.
//!
//! How they are asked is not known here. They are asked only for what is neither in memory nor on the disk of this host, and
//! what they give is imported as pages of the disk are.

use std::fmt;
use std::time::Duration;

use skep_cache::{PageQuestion, PageStream};

/// Gets KV pages from other hosts. An engine's loop calls it, so it must be quick and must not wait.
pub trait PagePeers: fmt::Debug + Send + Sync + 'static {
    /// Returns whether there is a host that can be asked now.
    fn are_there(&self) -> bool;

    /// Estimates the time until `bytes` of pages have arrived, as it was lately.
    fn fetch_time(&self, bytes: u64) -> Duration;

    /// Begins to ask all hosts for pages, and to fetch those that one of them has, in order and from the first on. The stream
    /// ends with the last one, or with the first one that is missing, late or not as it should be; dropping it ends the
    /// fetch. Returns `None` if too much is being fetched.
    fn fetch(&self, question: PageQuestion) -> Option<PageStream>;
}
