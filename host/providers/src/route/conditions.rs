//! The conditions under which a member of a route gets a request.

use std::{fmt, sync::Arc};

use skep_engine::{
    EngineError, Model,
    chat::{ChatOptions, Input},
};

use super::Inner;

/// The answer's expected length for its price, where neither the request nor the model bounds it.
const EXPECTED_OUTPUT: usize = 512;

/// One model of a route.
#[derive(Debug, Clone)]
pub struct Member {
    pub model: Model,
    /// Share of the sessions in a weighted route; 0 means that the model is only tried after all others.
    pub weight: u32,
    pub conditions: Conditions,
    pub cost: CostEstimate,
}

/// Estimates what a request to one model costs now, from the number of tokens of its prompt and of its answer.
#[derive(Clone)]
pub struct CostEstimate(Arc<Estimate>);

type Estimate = dyn Fn(usize, usize) -> Option<f64> + Send + Sync;

impl CostEstimate {
    /// Creates an estimate. `cost` gets the tokens of the prompt, of which none is cached, and those of the answer; it
    /// returns `None` if the price is unknown.
    pub fn new(cost: impl Fn(usize, usize) -> Option<f64> + Send + Sync + 'static) -> Self {
        CostEstimate(Arc::new(cost))
    }

    /// Creates the estimate of a model without a price.
    pub fn unknown() -> Self {
        CostEstimate::new(|_, _| None)
    }

    /// Returns the cost of a request; `None` if it is unknown.
    pub fn of(&self, prompt_tokens: usize, output_tokens: usize) -> Option<f64> {
        (self.0)(prompt_tokens, output_tokens)
    }
}

impl fmt::Debug for CostEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CostEstimate")
    }
}

/// Conditions on a request. A condition that is not set always holds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Conditions {
    /// Bounds on the prompt's length in tokens, which is estimated.
    pub min_prompt_tokens: Option<usize>,
    pub max_prompt_tokens: Option<usize>,
    /// Whether the request has tools.
    pub tools: Option<bool>,
    /// Whether the request has images.
    pub images: Option<bool>,
    /// The tenants whose requests the model gets.
    pub tenants: Option<Vec<String>>,
    /// The highest cost of a request, in the currency of the model's [`CostEstimate`]. It is estimated as if nothing of
    /// the prompt were cached. A model whose price is unknown gets no request then.
    pub max_price: Option<f64>,
}

impl Member {
    /// Returns a member that takes every request.
    pub fn new(model: impl Into<Model>) -> Self {
        Member {
            model: model.into(),
            weight: 1,
            conditions: Conditions::default(),
            cost: CostEstimate::unknown(),
        }
    }

    /// Returns the reason that the model does not take a request.
    fn objection(&self, input: &Input, prompt_tokens: usize, options: &ChatOptions) -> Option<String> {
        let Conditions { min_prompt_tokens, max_prompt_tokens, tools, images, tenants, max_price } =
            &self.conditions;
        let requested = options.max_tokens.unwrap_or(1);
        let sure_tokens = input.estimated_tokens_without_reasoning(options.opening());
        if self.model.context_length().is_some_and(|length| sure_tokens.saturating_add(requested) > length) {
            return Some(format!("about {sure_tokens} prompt tokens do not fit its context"));
        }
        if min_prompt_tokens.is_some_and(|least| prompt_tokens < least) {
            return Some(format!("about {prompt_tokens} prompt tokens are less than its min_prompt_tokens"));
        }
        if max_prompt_tokens.is_some_and(|most| prompt_tokens > most) {
            return Some(format!("about {prompt_tokens} prompt tokens are more than its max_prompt_tokens"));
        }
        let has_images = input.images().next().is_some();
        for (what, wanted, has) in
            [("tools", tools, !options.tools.is_empty()), ("images", images, has_images)]
        {
            match wanted {
                Some(true) if !has => return Some(format!("the request has no {what}")),
                Some(false) if has => return Some(format!("the request has {what}")),
                _ => {}
            }
        }
        let tenant = &options.affinity.tenant;
        if tenants.as_ref().is_some_and(|tenants| !tenants.contains(tenant)) {
            return Some(format!("it does not serve the tenant {tenant:?}"));
        }
        if let Some(most) = max_price {
            let bound = options.max_tokens.or_else(|| self.model.abilities().max_output);
            let output = bound.unwrap_or(EXPECTED_OUTPUT);
            let Some(price) = self.cost.of(prompt_tokens, output) else {
                return Some("it has a max_price, and its price is unknown".to_owned());
            };
            if price > *most {
                return Some(format!("the request would cost about {price}, more than its max_price"));
            }
        }
        self.model
            .check(options)
            .and_then(|()| self.model.accepts(input))
            .err()
            .map(|error| error.to_string())
    }
}

impl Inner {
    /// Returns the members that take a request, in the order in which they are tried.
    pub(super) fn candidates(
        &self,
        input: &Input,
        options: &ChatOptions,
    ) -> Result<Vec<&Member>, EngineError> {
        let prompt_tokens = input.estimated_tokens(options.opening());
        let mut objections = Vec::new();
        let mut members = Vec::new();
        for member in &self.options.members {
            match member.objection(input, prompt_tokens, options) {
                None => members.push(member),
                Some(objection) => objections.push(format!("{}: {objection}", member.model.name())),
            }
        }
        if members.is_empty() {
            let route = &self.options.name;
            let message =
                format!("no model of the route {route} takes this request: {}", objections.join("; "));
            return Err(EngineError::InvalidRequest { parameter: "model".to_owned(), message });
        }
        self.options.choice.sort(&mut members, &options.affinity);
        Ok(members)
    }
}
