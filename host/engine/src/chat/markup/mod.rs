//! The markups in which models declare, write and show tool calls, each described as data in a file of its own.
//!
//! A description says how a call is written, from which the grammar of the output and the text of earlier calls are
//! made, how it is read, and how a model's own template shows that it is used.
//!
//! Invariant: what the grammar of a markup allows, its reader finds, with the same names and arguments.

mod deepseek_v3;
mod deepseek_v31;
mod deepseek_v32;
mod glm;
pub(super) mod harmony;
pub(super) mod hermes;
mod ids;
mod kimi;
mod llama3;
mod mistral;
mod qwen3_coder;
mod resolved;
mod written;

pub(super) use hermes::{CLOSE, OPEN, RESPONSE_CLOSE, RESPONSE_OPEN, TOOLS_CLOSE, TOOLS_OPEN};
#[cfg(test)]
pub(super) use hermes::{RESERVED, assistant};
pub(super) use ids::CallIds;
pub(super) use resolved::{call_markup, special};

use skep_model::Tokenizer;

use crate::chat::message::ToolSpec;

/// One markup.
#[derive(Debug)]
pub struct Markup {
    pub name: &'static str,
    /// A template uses the markup if it contains all texts of one of these lists.
    pub(super) signs: &'static [&'static [&'static str]],
    pub(super) call: CallForm,
    pub(super) reading: Reading,
    /// Texts that are special tokens in the vocabularies of some models.
    pub(super) tokens: &'static [&'static str],
    /// Texts, besides the beginning of a call, that free text never contains.
    pub(super) reserved: &'static [&'static str],
    pub(super) ids: CallIds,
    /// The field of a message in which templates expect its reasoning.
    pub(super) reasoning_field: &'static str,
    /// Describes the tools in the system message, where templates of the family leave that to the caller.
    pub(super) declaration: Option<fn(&[ToolSpec]) -> String>,
}

/// The way in which calls are written.
#[derive(Debug)]
pub(super) enum CallForm {
    /// A JSON object with name and arguments between two tags.
    Hermes,
    Parts(Parts),
}

/// The parts of calls, in order.
#[derive(Debug)]
pub(super) struct Parts {
    pub before_text: &'static [Part],
    pub before: &'static [Part],
    pub call: &'static [Part],
    pub between: &'static [Part],
    pub after: &'static [Part],
    /// Whether calls stand only at the beginning of an answer.
    pub only_first: bool,
    /// Whether one answer may make several calls.
    pub many: bool,
}

/// One part of a call.
#[derive(Debug, Clone, Copy)]
pub(super) enum Part {
    Text(&'static str),
    /// White space that may be written in another way, or left out.
    Gap(&'static str),
    Name,
    /// The number of the call in the conversation.
    Number,
    /// An id of nine letters and digits.
    Id,
    /// The arguments, as a JSON object.
    Arguments,
    /// The arguments one by one.
    Parameters(Parameters),
}

/// The way in which arguments are written one by one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parameters {
    pub before_name: &'static str,
    /// Texts between the name and a value: for a string as it is, and for JSON.
    pub before_string: &'static str,
    pub before_json: &'static str,
    /// Text at the end of a value.
    pub close: &'static str,
    /// White space before `close` and after it, as templates write it.
    pub space: (&'static str, &'static str),
}

/// The way in which calls are read.
#[derive(Debug)]
pub(super) enum Reading {
    Hermes,
    Calls(CallReading),
    Harmony,
}

/// The texts by which calls are found, and the form of what follows.
#[derive(Debug)]
pub(super) struct CallReading {
    /// Texts that may stand before calls.
    pub sections: &'static [&'static str],
    /// Texts that begin a call.
    pub opens: &'static [&'static str],
    pub head: HeadForm,
    /// Texts that may stand after a call.
    pub closers: &'static [&'static str],
    /// Whether an answer, or what follows a call, may begin with the JSON object of a call.
    pub bare: bool,
}

/// The form of what follows the beginning of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeadForm {
    /// `functions.NAME:NUMBER`, a marker, JSON.
    Kimi,
    /// `NAME`, a marker, JSON; or `function`, the marker, `NAME`, a fenced block.
    DeepSeek,
    /// A list of objects; or `NAME`, markers, JSON.
    Mistral,
    /// An object with `name` and `arguments` or `parameters`.
    Object,
    /// `NAME>` and parameters.
    Function,
    /// `NAME` and pairs of keys and values.
    Pairs,
    /// `NAME">` and parameters that say whether they are strings.
    Invoke,
}

/// All markups. A template's own is the first that it shows.
static MARKUPS: [&Markup; 14] = [
    &harmony::MARKUP,
    &kimi::MARKUP,
    &deepseek_v32::V4,
    &deepseek_v32::V32,
    &deepseek_v3::MARKUP,
    &deepseek_v31::MARKUP,
    &mistral::V11,
    &mistral::V13,
    &mistral::V3,
    &qwen3_coder::MARKUP,
    &glm::V47,
    &glm::V45,
    &llama3::MARKUP,
    &hermes::MARKUP,
];

/// The tokens of vocabularies that choose a markup where a template shows none. The first whose tokens are all there is chosen.
static VOCABULARIES: [(&[&str], &Markup); 9] = [
    (&[harmony::CHANNEL, harmony::MESSAGE, harmony::CALL], &harmony::MARKUP),
    (&["<|tool_call_begin|>", "<|tool_call_argument_begin|>"], &kimi::MARKUP),
    (&["｜DSML｜"], &deepseek_v32::V32),
    (&[deepseek_v3::BEGIN, deepseek_v3::SEPARATOR], &deepseek_v3::MARKUP),
    // The later tokenizers of Mistral keep the token of ids, and those that reason do not write it.
    (&["[TOOL_CALLS]", "[ARGS]", "[THINK]"], &mistral::V13),
    (&["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"], &mistral::V11),
    (&["[TOOL_CALLS]"], &mistral::V3),
    (&["<arg_key>", "<arg_value>"], &glm::V45),
    (&["<|start_header_id|>", "<|python_tag|>"], &llama3::MARKUP),
];

/// Returns the markup of models whose template and vocabulary show none.
pub(super) fn default() -> &'static Markup {
    &hermes::MARKUP
}

impl Markup {
    /// Returns the markup with this name, or an error that lists the known ones.
    pub fn named(name: &str) -> Result<&'static Markup, String> {
        MARKUPS.iter().find(|markup| markup.name == name).copied().ok_or_else(|| {
            let mut names: Vec<&str> = MARKUPS.iter().map(|markup| markup.name).collect();
            names.sort_unstable();
            format!("{name:?} is not a known markup; the markups are {}", names.join(", "))
        })
    }

    /// Returns the markup that a model's template uses; if it shows none, the one whose tokens the vocabulary has, or the
    /// default. A model without a template has an empty one.
    pub fn of_model(source: &str, tokenizer: Option<&Tokenizer>) -> &'static Markup {
        let shown = MARKUPS.iter().find(|markup| markup.is_shown_by(source)).copied();
        // Some vocabularies list the tokens of calls without calling them special.
        let has = |text: &str| tokenizer.is_some_and(|tokenizer| tokenizer.token_id(text).is_some());
        let known = || {
            let found = VOCABULARIES.iter().find(|(texts, _)| texts.iter().all(|text| has(text)));
            found.map(|(_, markup)| *markup)
        };
        shown.or_else(known).unwrap_or_else(default)
    }

    /// Returns whether a template uses the markup, so that it gets tools and calls as data.
    pub(super) fn is_shown_by(&self, source: &str) -> bool {
        self.signs.iter().any(|texts| texts.iter().all(|text| source.contains(text)))
    }

    pub(super) fn is_hermes(&self) -> bool {
        matches!(self.call, CallForm::Hermes)
    }

    /// Returns the texts of calls that an answer without calls does not contain.
    pub(super) fn marks(&self) -> impl Iterator<Item = &'static str> {
        let opens = match &self.reading {
            Reading::Hermes => &[hermes::OPEN][..],
            Reading::Calls(reading) => reading.opens,
            Reading::Harmony => &[],
        };
        let sections = match &self.reading {
            Reading::Calls(reading) => reading.sections,
            Reading::Hermes | Reading::Harmony => &[],
        };
        let mut marks: Vec<&'static str> =
            opens.iter().chain(sections).chain(self.reserved).copied().collect();
        // A text that contains another one is excluded with it.
        let all = marks.clone();
        let mut seen = Vec::new();
        marks.retain(|mark| {
            let is_new =
                !seen.contains(mark) && !all.iter().any(|other| other != mark && mark.contains(other));
            seen.push(*mark);
            is_new
        });
        marks.into_iter()
    }

    /// Returns the texts with which an answer of calls begins, of which each is one token in the vocabularies of its
    /// models.
    pub(super) fn first_marks(&self) -> &'static [&'static str] {
        match &self.reading {
            Reading::Hermes => &[hermes::OPEN],
            Reading::Calls(reading) if reading.sections.is_empty() => reading.opens,
            Reading::Calls(reading) => reading.sections,
            Reading::Harmony => &[],
        }
    }

    /// Returns whether arguments are written one by one.
    pub(super) fn writes_parameters(&self) -> bool {
        let is_parameters = |part: &Part| matches!(part, Part::Parameters(_));
        matches!(&self.call, CallForm::Parts(parts) if parts.call.iter().any(is_parameters))
    }

    /// Returns whether calls begin as JSON does.
    pub(super) fn begins_like_json(&self) -> bool {
        matches!(&self.call, CallForm::Parts(parts) if parts.only_first)
    }

    /// Returns whether one answer may make several calls.
    pub(super) fn allows_many(&self) -> bool {
        match &self.call {
            CallForm::Hermes => true,
            CallForm::Parts(parts) => parts.many,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_markup_has_one_name_and_is_found_by_it() {
        for markup in MARKUPS {
            assert!(std::ptr::eq(Markup::named(markup.name).unwrap(), markup), "{}", markup.name);
        }
        let error = Markup::named("klingon").unwrap_err();
        assert!(
            error.contains("\"klingon\"") && error.contains("glm-4.5, glm-4.7, harmony, hermes"),
            "{error}"
        );
    }

    #[test]
    fn templates_choose_their_markup() {
        for (source, name) in [
            ("{{ messages }}", "hermes"),
            ("<tool_call>{{ tool_call.name }}", "hermes"),
            ("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", "kimi-k2"),
            ("<tool_call>\n<function=name>\n<parameter=one>", "qwen3-coder"),
            ("[TOOL_CALLS][", "mistral-v3"),
            ("[TOOL_CALLS] [CALL_ID] [ARGS]", "mistral-v11"),
            ("[TOOL_CALLS] name [ARGS]", "mistral-v13"),
        ] {
            assert_eq!(Markup::of_model(source, None).name, name, "{source}");
        }
    }

    #[test]
    fn tokens_choose_the_markup_where_the_template_shows_none() {
        let chatml = skep_model::ChatTemplate::chatml_default();
        let cases: [(&[&str], &str); 12] = [
            (&["<|channel|>", "<|message|>", "<|call|>"], "harmony"),
            (
                &["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"],
                "kimi-k2",
            ),
            (&["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"], "deepseek-v3"),
            (&["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "｜DSML｜"], "deepseek-v3.2"),
            (&["[TOOL_CALLS]"], "mistral-v3"),
            (&["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"], "mistral-v11"),
            (&["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]"], "mistral-v13"),
            (&["<tool_call>", "</tool_call>", "<arg_key>", "<arg_value>"], "glm-4.5"),
            (&["<|start_header_id|>", "<|python_tag|>"], "llama3"),
            (&["<|start_header_id|>"], "hermes"),
            (&["<tool_call>", "</tool_call>"], "hermes"),
            (&[], "hermes"),
        ];
        for (tokens, name) in cases {
            let tokenizer = crate::tests::fixture::tokenizer_with(tokens);
            for source in ["", chatml.source()] {
                assert_eq!(Markup::of_model(source, Some(&tokenizer)).name, name, "{tokens:?}");
            }
            let shown = Markup::of_model("<tool_call>\n<function=name>\n<parameter=one>", Some(&tokenizer));
            assert_eq!(shown.name, "qwen3-coder", "a template comes before {tokens:?}");
        }
    }
}
