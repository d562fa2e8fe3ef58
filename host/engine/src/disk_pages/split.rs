//! Decides whether another host computes the beginning of a prompt, by measured rates.
//!
//! A prompt that is computed elsewhere does not lengthen the steps of the sequences that decode here; its pages have to come over
//! the network, and to wait for other prompts there. So a prompt goes elsewhere if it is long enough that moving its pages costs
//! less than computing them, and if that host would not take much longer than this one.

use std::time::Duration;

use crate::PrefillView;

/// A prompt is computed here if the other host would take longer by this factor.
const MOST_TIMES: f64 = 2.0;

/// The measured times of a token, in seconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct TokenTimes {
    pub compute_s: f64,
    pub fetch_s: f64,
    /// Time of a fetch that does not depend on its length.
    pub latency_s: f64,
}

/// Returns the least number of tokens that are computed elsewhere; `None` if moving pages costs more than computing them.
pub(super) fn threshold(times: TokenTimes, view: PrefillView) -> Option<usize> {
    let saved_s = times.compute_s - times.fetch_s;
    let least = (saved_s > 0.0).then(|| (times.latency_s / saved_s).ceil())?;
    // A number of tokens beyond any prompt is as good as none.
    (least < 1e9).then(|| view.min_tokens.max(least as usize))
}

/// Returns the time within which another host is expected to have given the pages of this many tokens; `None` if they are to be
/// computed here.
pub(super) fn expected(tokens: usize, times: TokenTimes, view: PrefillView) -> Option<Duration> {
    if tokens < threshold(times, view)? {
        return None;
    }
    let there_s = view.tokens_per_s.map_or(times.compute_s, |rate| 1.0 / rate.max(1.0));
    let (own, ahead) = (tokens as f64, view.tokens_ahead as f64);
    let expected_s = times.latency_s + own * times.fetch_s + (own + ahead) * there_s;
    (expected_s <= MOST_TIMES * (own * times.compute_s).max(own * there_s))
        .then(|| Duration::from_secs_f64(expected_s))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: TokenTimes = TokenTimes { compute_s: 0.002, fetch_s: 0.0005, latency_s: 0.03 };
    const VIEW: PrefillView = PrefillView { min_tokens: 8, tokens_ahead: 0, tokens_per_s: Some(500.0) };

    #[test]
    fn the_threshold_follows_the_rates_and_is_not_below_the_setting() {
        assert_eq!(threshold(TIMES, VIEW), Some(20));
        assert_eq!(threshold(TokenTimes { latency_s: 0.3, ..TIMES }, VIEW), Some(200));
        assert_eq!(threshold(TokenTimes { compute_s: 0.02, ..TIMES }, VIEW), Some(8));
        assert_eq!(threshold(TIMES, PrefillView { min_tokens: 256, ..VIEW }), Some(256));
        assert_eq!(threshold(TokenTimes { fetch_s: 0.002, ..TIMES }, VIEW), None, "the network is too slow");
    }

    #[test]
    fn a_busy_host_is_not_asked() {
        let seconds = |tokens, view| expected(tokens, TIMES, view).map(|time| time.as_secs_f64());
        assert_eq!(seconds(19, VIEW), None);
        let alone = seconds(1_000, VIEW).expect("it is idle");
        assert!((2.52..2.54).contains(&alone), "{alone}");
        let busy = PrefillView { tokens_ahead: 500, ..VIEW };
        let behind = seconds(1_000, busy).expect("it takes less than twice as long");
        assert!((behind - alone - 1.0).abs() < 1e-6, "{behind}");
        assert_eq!(seconds(1_000, PrefillView { tokens_ahead: 2_000, ..VIEW }), None);
        assert!(
            seconds(1_000, PrefillView { tokens_per_s: None, ..VIEW }).is_some(),
            "it counts as this one"
        );
    }
}
