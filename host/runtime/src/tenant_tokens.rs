//! Tokens that a tenant uses without an agent: requests that name a model directly count toward its
//! daily budgets and its usage too.
//!
//! They are recorded in the background (`use_queue`) when a generation ends, so that no caller waits for the write.

use crate::{
    BudgetUsedUp, RuntimeError, WorstCase,
    token_budget::{DayShare, TokenBudgets, TokenSpend},
    usage::{Amount, BudgetRefusal, ModelUse, RequestUse, Source, billed_models},
    use_queue::UseQueue,
};
use skep_engine::{
    EngineError, Model, TokenEvent, Unreported, Usage,
    chat::{ChatEvent, ChatOutcome, ChatStream},
};
use std::sync::Arc;

/// Retry delay when what is left of a budget is reserved for others.
const RETRY_RESERVED_MS: u32 = 1_000;

/// The rest of a tenant's daily budgets, which were not used up when this was created.
#[derive(Clone)]
pub struct TenantBudget {
    share: Arc<DayShare>,
    source: Source,
    uses: UseQueue,
}

/// Counts the tokens of one generation. When dropped, it records what was used.
pub struct TenantTokens {
    budget: TenantBudget,
    model: String,
    reserved: Amount,
    produced: usize,
    used: RequestUse,
    unreported: Unreported,
}

impl TenantBudget {
    /// Returns the budget for work of a tenant that starts without an agent, by the request of a key.
    /// Fails if the budget is used up.
    pub(crate) fn open(
        tokens: &TokenBudgets,
        uses: &UseQueue,
        tenant: &str,
        key: Option<&str>,
    ) -> Result<Self, BudgetUsedUp> {
        let share = tokens.share(tenant, None);
        share.check()?;
        let source = Source { tenant: tenant.to_owned(), key: key.map(str::to_owned), ..Source::default() };
        Ok(TenantBudget { share: Arc::new(share), source, uses: uses.clone() })
    }

    /// Reserves the maximum cost of a request to a model. Fails if a budget in money has less left, or
    /// if there is such a budget and the model, or one that a route may choose, has no price.
    pub fn meter(&self, model: &Model, worst: WorstCase) -> Result<TenantTokens, RuntimeError> {
        let reserved = self.share.money.reserve(&billed_models(model), worst, worst.output_tokens);
        let reserved = reserved.map_err(|none| match none {
            BudgetRefusal::UsedUp(why) => RuntimeError::from(why),
            BudgetRefusal::NoPrice(why) => RuntimeError::from(why),
            BudgetRefusal::Reserved => EngineError::Busy { retry_after_ms: RETRY_RESERVED_MS }.into(),
        })?;
        Ok(TenantTokens {
            budget: self.clone(),
            model: model.name().to_owned(),
            reserved: reserved.amount,
            produced: 0,
            used: RequestUse::default(),
            unreported: Unreported::default(),
        })
    }
}

impl TenantTokens {
    /// Sets the record of what the events of the answer do not report.
    pub fn watch(&mut self, unreported: Unreported) {
        self.unreported = unreported;
    }

    /// Sets the number of tokens produced so far, whether events report them or not.
    pub fn produced(&mut self, tokens: usize) {
        self.produced = tokens;
        let reported = tokens.saturating_sub(self.unreported.output_tokens());
        self.used.produced(u32::try_from(reported).unwrap_or(u32::MAX));
    }

    /// Counts what an event of a chat says about its use.
    pub fn note_chat(&mut self, event: &ChatEvent) {
        match event {
            ChatEvent::Started { prompt_tokens, cached_tokens, cache_write_tokens } => {
                self.used.started(*prompt_tokens, *cached_tokens, *cache_write_tokens);
            }
            // Usage reports name the model that answers, not the route that chose it.
            ChatEvent::Routed(routed) => self.model.clone_from(&routed.model),
            ChatEvent::Finished(outcome) => self.finished(&outcome.usage),
            _ => {}
        }
    }

    /// Counts what an event of a completion says about its use.
    pub fn note_completion(&mut self, event: &TokenEvent) {
        match event {
            TokenEvent::Started { prompt_tokens, cached_tokens } => {
                self.used.started(*prompt_tokens, *cached_tokens, 0);
            }
            TokenEvent::Finished(finished) => self.finished(&finished.usage),
            TokenEvent::Token(_) | TokenEvent::PromptLogprobs(_) => {}
        }
    }

    /// Reads a chat to its end, and shows `note` its events.
    pub(crate) async fn follow(
        mut self,
        mut chat: ChatStream,
        mut note: impl FnMut(&ChatEvent),
    ) -> Result<ChatOutcome, EngineError> {
        self.watch(chat.unreported());
        while let Some(event) = chat.next().await {
            self.produced(chat.spent_tokens());
            let event = event?;
            self.note_chat(&event);
            note(&event);
            if let ChatEvent::Finished(outcome) = event {
                return Ok(outcome);
            }
        }
        Err(EngineError::Cancelled)
    }

    fn finished(&mut self, usage: &Usage) {
        self.produced = usage.produced_tokens() + self.unreported.output_tokens();
        self.used.finished(usage);
    }
}

impl Drop for TenantTokens {
    fn drop(&mut self) {
        let TenantBudget { share, source, uses } = &self.budget;
        let models = ModelUse::of_request(&self.model, &self.used, &self.unreported.uses());
        share.money.settle(self.reserved, &models);
        let spend = TokenSpend::new(share, self.produced as u64, source, &models);
        if spend.is_empty() {
            return;
        }
        // Counted before the write, so that the next request is refused even if the write is
        // pending.
        spend.add_to_day();
        uses.record(spend.row(), spend.usage());
    }
}
