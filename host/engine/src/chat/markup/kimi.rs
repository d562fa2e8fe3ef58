//! Kimi K2, K2 Thinking and K2.5: calls in a section, each with an id that holds the tool's name and counts the calls of
//! the conversation.

use super::{CallForm, CallIds, CallReading, HeadForm, Markup, Part, Parts, Reading};

const SECTION: &str = "<|tool_calls_section_begin|>";
const SECTION_END: &str = "<|tool_calls_section_end|>";
const BEGIN: &str = "<|tool_call_begin|>";
const ARGUMENTS: &str = "<|tool_call_argument_begin|>";
const END: &str = "<|tool_call_end|>";

pub(super) static MARKUP: Markup = Markup {
    name: "kimi-k2",
    signs: &[&[BEGIN, ARGUMENTS]],
    call: CallForm::Parts(Parts {
        before_text: &[],
        before: &[Part::Text(SECTION)],
        call: &[
            Part::Text(BEGIN),
            Part::Text("functions."),
            Part::Name,
            Part::Text(":"),
            Part::Number,
            Part::Text(ARGUMENTS),
            Part::Arguments,
            Part::Text(END),
        ],
        between: &[],
        after: &[Part::Text(SECTION_END)],
        only_first: false,
        many: true,
    }),
    reading: Reading::Calls(CallReading {
        // Some answers name the section in the singular.
        sections: &[SECTION, "<|tool_call_section_begin|>"],
        opens: &[BEGIN],
        head: HeadForm::Kimi,
        closers: &[END, SECTION_END, "<|tool_call_section_end|>"],
        bare: false,
    }),
    tokens: &[SECTION, SECTION_END, BEGIN, ARGUMENTS, END],
    reserved: &[BEGIN, ARGUMENTS, END, SECTION_END],
    ids: CallIds::Kimi,
    reasoning_field: "reasoning_content",
    declaration: None,
};
