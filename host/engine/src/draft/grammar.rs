//! Drafts from the output format. A constraint with a single spelling of JSON leaves no choice about keys
//! and punctuation, whereas the constraint itself allows white space and every tokenization.
//!
//! Invariant: the drafter proposes and decides nothing. Its drafts are checked against the constraint's own
//! masks, so a format that the output has left costs a row and changes no output.

use skep_model::Tokenizer;

use crate::Constraint;
use crate::constraint::{ConstraintCompiler, OutputConstraint, Spelling};

/// Number of tokens at the end of a prompt in which its spelling of JSON is looked for.
const LOOKED_AT_TOKENS: usize = 2048;

/// The formats that the output of one sequence may have.
pub(crate) struct GrammarDrafter {
    /// Possible formats, the likelier one first.
    forms: Vec<Form>,
}

/// One form, and how far the output follows it.
struct Form {
    beginning: OutputConstraint,
    state: OutputConstraint,
    /// Number of output tokens that have this form.
    tokens: usize,
    /// Whether all output tokens had this form at the last check.
    fits: bool,
}

impl GrammarDrafter {
    /// Creates a drafter for the output of a conversation. The spelling that the prompt used last is the
    /// likelier one.
    pub fn new(
        compiler: &ConstraintCompiler,
        constraint: &Constraint,
        prompt: &[u32],
        tokenizer: &Tokenizer,
    ) -> Self {
        let spellings = match (constraint, last_spelling(prompt, tokenizer)) {
            // The text of these constraints has a single form already.
            (Constraint::Regex(_) | Constraint::Lark(_), _) => Vec::new(),
            (_, Spelling::Spaced) => vec![Spelling::Spaced, Spelling::Compact],
            (_, Spelling::Compact) => vec![Spelling::Compact, Spelling::Spaced],
        };
        // A form that cannot be compiled is left out.
        let forms = spellings.into_iter().filter_map(|spelling| compiler.strict(constraint, spelling).ok());
        Self::of_forms(forms)
    }

    fn of_forms(forms: impl IntoIterator<Item = OutputConstraint>) -> Self {
        let form = |state: OutputConstraint| Form { beginning: state.fork(), state, tokens: 0, fits: true };
        GrammarDrafter { forms: forms.into_iter().map(form).collect() }
    }

    /// Returns the tokens that the first form that fits the output predicts, at most `limit` of them.
    pub fn propose(&mut self, output: &[u32], limit: usize) -> Vec<u32> {
        self.forms.iter_mut().for_each(|form| form.follow(output));
        let Some(form) = self.forms.iter_mut().find(|form| form.fits) else { return Vec::new() };
        let mut likely = form.state.forced();
        likely.truncate(limit);
        likely
    }

    /// Rolls back to the first `tokens` tokens of the output.
    pub fn rollback(&mut self, tokens: usize) {
        for form in &mut self.forms {
            form.fits = true;
            let more = form.tokens.saturating_sub(tokens);
            form.tokens -= more;
            if !form.state.rollback(more) {
                (form.state, form.tokens) = (form.beginning.fork(), 0);
            }
        }
    }
}

impl Form {
    fn follow(&mut self, output: &[u32]) {
        while self.fits
            && let Some(token) = output.get(self.tokens)
        {
            self.fits = self.state.try_accept(*token);
            self.tokens += usize::from(self.fits);
        }
    }
}

/// Returns the spelling of the last JSON in the prompt, or the usual spelling of models if it contains none.
fn last_spelling(prompt: &[u32], tokenizer: &Tokenizer) -> Spelling {
    let end = &prompt[prompt.len().saturating_sub(LOOKED_AT_TOKENS)..];
    let text: Vec<u8> =
        end.iter().flat_map(|id| tokenizer.token_bytes(*id).unwrap_or_default()).copied().collect();
    let spelling = |window: &[u8]| match window {
        b"\": " => Some(Spelling::Spaced),
        [b'"', b':', b'"' | b'{' | b'[' | b'0'..=b'9' | b'-' | b't' | b'f' | b'n'] => Some(Spelling::Compact),
        _ => None,
    };
    text.windows(3).rev().find_map(spelling).unwrap_or(Spelling::Spaced)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::tests::fixture::{EOS, byte_tokenizer};

    fn bytes(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    fn text(tokens: &[u32]) -> String {
        tokens.iter().map(|id| char::from(u8::try_from(*id).expect("a byte"))).collect()
    }

    /// Returns a drafter with a spaced and a compact form, in that order.
    fn drafter() -> GrammarDrafter {
        let compiler = ConstraintCompiler::new(&Arc::new(byte_tokenizer()), 320, &[EOS], "bytes").unwrap();
        let forms = [r#"\{"a": [0-9], "bc": [0-9]\}"#, r#"\{"a":[0-9],"bc":[0-9]\}"#];
        let form = |pattern: &str| compiler.compile(&Constraint::Regex(pattern.to_string())).unwrap();
        GrammarDrafter::of_forms(forms.map(form))
    }

    #[test]
    fn the_output_decides_which_format_is_drafted() {
        for (output, expected) in [
            ("", "{\"a\": "),
            ("{\"a", "\": "),
            ("{\"a\": 1", ", \"bc\": "),
            ("{\"a\":1", ",\"bc\":"),
            ("{\"a\":1,\"bc\":2", "}"),
            ("{\"a\": 1,\"", ""),
            ("[", ""),
        ] {
            let mut drafter = drafter();
            assert_eq!(text(&drafter.propose(&bytes(output), 40)), expected, "{output:?}");
            assert_eq!(text(&drafter.propose(&bytes(output), 2)), expected[..expected.len().min(2)]);
        }
    }

    #[test]
    fn rolled_back_tokens_are_drafted_again_even_in_an_abandoned_format() {
        let mut drafter = drafter();
        assert_eq!(text(&drafter.propose(&bytes("{\"a\":1,\"b"), 40)), "c\":");
        drafter.rollback(4);
        assert_eq!(text(&drafter.propose(&bytes("{\"a\""), 40)), ": ");
        assert_eq!(text(&drafter.propose(&bytes("{\"a\": 3"), 40)), ", \"bc\": ");
        drafter.rollback(0);
        assert_eq!(text(&drafter.propose(&[], 1)), "{");
    }

    #[test]
    fn the_last_spelling_of_a_prompt_is_the_likelier_one() {
        for (prompt, expected) in [
            ("", Spelling::Spaced),
            ("no JSON: at all", Spelling::Spaced),
            ("{\"a\":1}", Spelling::Compact),
            ("{\"a\":{\"b\":[]}} and {\"a\": 1} then", Spelling::Spaced),
            ("{\"a\": 1} and {\"a\":true} then", Spelling::Compact),
            ("{\"a\":1} and \"quoted\":\n", Spelling::Compact),
        ] {
            assert_eq!(last_spelling(&bytes(prompt), &byte_tokenizer()), expected, "{prompt:?}");
        }
    }
}
