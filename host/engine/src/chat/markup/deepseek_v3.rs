//! DeepSeek V3 and R1: calls in a section, with the arguments in a fenced block.

use super::{CallForm, CallIds, CallReading, HeadForm, Markup, Part, Parts, Reading};

pub(super) const SECTION: &str = "<｜tool▁calls▁begin｜>";
pub(super) const SECTION_END: &str = "<｜tool▁calls▁end｜>";
pub(super) const BEGIN: &str = "<｜tool▁call▁begin｜>";
pub(super) const SEPARATOR: &str = "<｜tool▁sep｜>";
pub(super) const END: &str = "<｜tool▁call▁end｜>";
pub(super) const TOKENS: [&str; 5] = [SECTION, SECTION_END, BEGIN, SEPARATOR, END];
pub(super) const RESERVED: [&str; 4] = [BEGIN, SEPARATOR, END, SECTION_END];

pub(super) const fn reading() -> Reading {
    Reading::Calls(CallReading {
        sections: &[SECTION],
        opens: &[BEGIN],
        head: HeadForm::DeepSeek,
        closers: &["```<｜tool▁call▁end｜>", END, SECTION_END],
        bare: false,
    })
}

pub(super) static MARKUP: Markup = Markup {
    name: "deepseek-v3",
    signs: &[&[BEGIN, "```json"]],
    call: CallForm::Parts(Parts {
        before_text: &[],
        before: &[Part::Text(SECTION)],
        call: &[
            Part::Text(BEGIN),
            Part::Text("function"),
            Part::Text(SEPARATOR),
            Part::Name,
            Part::Text("\n```json\n"),
            Part::Arguments,
            Part::Text("\n```"),
            Part::Text(END),
        ],
        between: &[Part::Gap("\n")],
        after: &[Part::Text(SECTION_END)],
        only_first: false,
        many: true,
    }),
    reading: reading(),
    tokens: &TOKENS,
    reserved: &RESERVED,
    ids: CallIds::Own,
    reasoning_field: "reasoning_content",
    declaration: None,
};
