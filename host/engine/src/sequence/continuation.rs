//! Whether the client of a sequence that ends is expected to continue it soon, as far as the request and its output show
//! it: a call of a tool is followed by a request with its result, and a form that a session asks for is read by a program,
//! such as an agent whose next step depends on it.

use super::Sequence;
use crate::{BeforeCalls, Constraint, FinishReason, ToolCallForm};

impl Sequence {
    /// Returns whether the client is expected to continue the output soon, if it ends for this reason.
    pub fn expects_continuation(&self, reason: &FinishReason) -> bool {
        let is_in_session = self.request.affinity.session.is_some();
        match &self.request.constraint {
            _ if reason.cuts_off() => false,
            None => false,
            Some(Constraint::ToolCalls(form)) => {
                let is_form = matches!(form.before, BeforeCalls::Answer(_));
                is_form && is_in_session || self.calls_tool(form)
            }
            Some(_) => is_in_session,
        }
    }

    /// Returns whether a complete output of this form calls a tool.
    fn calls_tool(&self, form: &ToolCallForm) -> bool {
        if form.tools.is_empty() || form.before == BeforeCalls::Nothing {
            return !form.tools.is_empty();
        }
        let opener = form.markup.opener().filter(|opener| !opener.is_empty());
        opener.is_some_and(|opener| self.context.tokenizer.decode(self.output(), false).contains(&opener))
    }
}
