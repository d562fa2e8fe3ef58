//! Mistral: calls after `[TOOL_CALLS]`. Tokenizers up to version 3 write one list of objects, version 11 a name, an id and
//! arguments, and version 13 a name and arguments.

use super::{CallForm, CallIds, CallReading, HeadForm, Markup, Part, Parts, Reading};

const CALLS: &str = "[TOOL_CALLS]";
const CALL_ID: &str = "[CALL_ID]";
const ARGUMENTS: &str = "[ARGS]";
const TOKENS: [&str; 5] = [CALLS, CALL_ID, ARGUMENTS, "[THINK]", "[/THINK]"];

const fn reading() -> Reading {
    Reading::Calls(CallReading {
        sections: &[],
        opens: &[CALLS],
        head: HeadForm::Mistral,
        closers: &[],
        bare: false,
    })
}

const fn markup(name: &'static str, signs: &'static [&'static [&'static str]], parts: Parts) -> Markup {
    Markup {
        name,
        signs,
        call: CallForm::Parts(parts),
        reading: reading(),
        tokens: &TOKENS,
        reserved: &[CALLS, ARGUMENTS],
        ids: CallIds::Nine,
        reasoning_field: "reasoning_content",
        declaration: None,
    }
}

pub(super) static V3: Markup = markup(
    "mistral-v3",
    &[&[CALLS]],
    Parts {
        before_text: &[],
        before: &[Part::Text(CALLS), Part::Text("[")],
        call: &[
            Part::Text("{\"name\": \""),
            Part::Name,
            Part::Text("\", \"arguments\": "),
            Part::Arguments,
            Part::Text("}"),
        ],
        between: &[Part::Text(", ")],
        after: &[Part::Text("]")],
        only_first: false,
        many: true,
    },
);

pub(super) static V11: Markup = markup(
    "mistral-v11",
    &[&[CALLS, CALL_ID]],
    Parts {
        before_text: &[],
        before: &[],
        call: &[
            Part::Text(CALLS),
            Part::Name,
            Part::Text(CALL_ID),
            Part::Id,
            Part::Text(ARGUMENTS),
            Part::Arguments,
        ],
        between: &[],
        after: &[],
        only_first: false,
        many: true,
    },
);

pub(super) static V13: Markup = markup(
    "mistral-v13",
    &[&[CALLS, ARGUMENTS]],
    Parts {
        before_text: &[],
        before: &[],
        call: &[Part::Text(CALLS), Part::Name, Part::Text(ARGUMENTS), Part::Arguments],
        between: &[],
        after: &[],
        only_first: false,
        many: true,
    },
);
