//! Incremental decoding of token ids into text, with stop strings.
//!
//! Invariant: the text returned so far plus the text that `finish` returns is the final text, and the final
//! text is the same for every grouping of the same tokens. A stop string ends the text at the match that
//! completes first (of several that complete together, the one that began first); the match is not part of the
//! text. Text that may be the beginning of a stop string is therefore held back.

use std::sync::Arc;

use skep_model::{TokenDecoder, Tokenizer};

/// The text of one generation.
#[derive(Clone)]
pub(crate) struct Detokenizer {
    decoder: TokenDecoder,
    stops: StopStrings,
}

/// New text, and the stop string that ended it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Delta {
    pub text: String,
    pub stopped: Option<String>,
}

impl Detokenizer {
    /// Creates the text of a generation, in which only the special tokens `kept` are text.
    pub fn new(tokenizer: &Arc<Tokenizer>, kept: Arc<[u32]>, stops: Vec<String>) -> Self {
        Detokenizer {
            decoder: TokenDecoder::keeping(tokenizer.clone(), kept),
            stops: StopStrings::new(stops),
        }
    }

    /// Adds a token and returns the text that is now certain. Text that may begin a stop string is held back.
    pub fn push(&mut self, token: u32) -> Delta {
        self.stops.push(&self.decoder.push(token))
    }

    /// Releases the text that was held back. It may complete a stop string.
    pub fn finish(&mut self) -> Delta {
        let rest = self.decoder.finish();
        let mut delta = self.stops.push(&rest);
        delta.text.push_str(&self.stops.finish());
        delta
    }
}

/// Cuts text at stop strings.
#[derive(Debug, Clone)]
struct StopStrings {
    stops: Vec<String>,
    held: String,
    stopped: bool,
}

impl StopStrings {
    fn new(stops: Vec<String>) -> Self {
        StopStrings { stops, held: String::new(), stopped: false }
    }

    fn push(&mut self, text: &str) -> Delta {
        if self.stopped {
            return Delta::default();
        }
        self.held.push_str(text);
        let first = self.stops.iter().filter_map(|stop| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start, stop))
        });
        if let Some((_, start, stop)) = first.min() {
            let stopped = Some(stop.clone());
            self.held.truncate(start);
            self.stopped = true;
            return Delta { text: std::mem::take(&mut self.held), stopped };
        }
        let keep = self.stops.iter().map(|stop| partial_match(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        Delta { text: std::mem::replace(&mut self.held, rest), stopped: None }
    }

    fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Returns the length in bytes of the longest proper prefix of `stop` that `text` ends with.
fn partial_match(text: &str, stop: &str) -> usize {
    let longest = stop.len().saturating_sub(1).min(text.len());
    (1..=longest).rev().find(|&n| text.as_bytes().ends_with(&stop.as_bytes()[..n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds `text` in chunks that end at the given characters, and returns the joined text and the stop
    /// string.
    fn run(stops: &[&str], text: &str, cuts: u32) -> (String, Option<String>) {
        let mut cutter = StopStrings::new(stops.iter().map(|stop| stop.to_string()).collect());
        let (mut joined, mut stopped, mut piece) = (String::new(), None, String::new());
        for (index, character) in text.chars().enumerate() {
            piece.push(character);
            if cuts >> (index % 32) & 1 == 1 {
                let delta = cutter.push(&std::mem::take(&mut piece));
                joined += &delta.text;
                stopped = stopped.or(delta.stopped);
            }
        }
        let delta = cutter.push(&piece);
        joined += &delta.text;
        stopped = stopped.or(delta.stopped);
        (joined + &cutter.finish(), stopped)
    }

    #[test]
    fn every_chunking_gives_the_same_text() {
        let cases: [(&[&str], &str, &str, Option<&str>); 8] = [
            (&[], "plain text", "plain text", None),
            (&["STOP"], "abSTOPcd", "ab", Some("STOP")),
            (&["STOP"], "abSTO", "abSTO", None),
            (&["aab"], "aaaab-", "aa", Some("aab")),
            (&["abc", "b"], "xabc", "xa", Some("b")),
            (&["bc", "abc"], "xabc", "x", Some("abc")),
            (&["é!"], "café!s", "caf", Some("é!")),
            (&["\n\n"], "a\nb\n\nc", "a\nb", Some("\n\n")),
        ];
        for (stops, text, expected, stop) in cases {
            for cuts in 0..1 << text.chars().count().min(12) {
                let (joined, stopped) = run(stops, text, cuts);
                assert_eq!(
                    (joined.as_str(), stopped.as_deref()),
                    (expected, stop),
                    "{text:?} cut at {cuts:b}"
                );
            }
        }
    }

    #[test]
    fn characters_of_several_tokens_are_emitted_whole() {
        let tokenizer = Arc::new(crate::tests::fixture::byte_tokenizer());
        let text = "naïve café 🐝 – ende";
        let mut detokenizer = Detokenizer::new(&tokenizer, Arc::default(), vec!["– e".to_string()]);
        let (mut joined, mut stopped) = (String::new(), None);
        for byte in text.bytes() {
            let delta = detokenizer.push(u32::from(byte));
            joined += &delta.text;
            stopped = stopped.or(delta.stopped);
        }
        joined += &detokenizer.finish().text;
        assert_eq!((joined.as_str(), stopped.as_deref()), ("naïve café 🐝 ", Some("– e")));
    }

    #[test]
    fn an_incomplete_character_at_the_end_is_replaced() {
        let tokenizer = Arc::new(crate::tests::fixture::byte_tokenizer());
        let mut detokenizer = Detokenizer::new(&tokenizer, Arc::default(), Vec::new());
        assert_eq!(detokenizer.push(u32::from("é".as_bytes()[0])).text, "");
        assert_eq!(detokenizer.finish().text, "\u{FFFD}");
    }

    #[test]
    fn only_a_possible_stop_prefix_is_held_back() {
        let mut cutter = StopStrings::new(vec!["</end>".to_string()]);
        assert_eq!(cutter.push("hello <").text, "hello ");
        assert_eq!(cutter.push("/en").text, "");
        assert_eq!(cutter.push("x").text, "</enx");
    }
}
