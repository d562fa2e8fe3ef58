//! Usage accounting: the cost of models, by tenant, key, agent, session, model and day.
//!
//! Invariants: sums are integers, so they are exact and the same in every order. Usage whose model has no price
//! on its day costs an unknown amount, which is never added up as 0. Whatever was used is counted once, in the
//! commit that ends the turn, or when a request without an agent ends.

mod budget;
mod day;
mod day_counts;
mod meter;
mod money;
mod price;
mod report;

pub(crate) use budget::{BudgetRefusal, MoneyBudgets, MoneyShare, ReservedCost};
pub use day::UsageDay;
use day_counts::DayCounts;
pub use meter::WorstCase;
pub(crate) use meter::{ModelUse, RequestUse, Source, billed_models, most_prompt_tokens};
pub use money::{Amount, Currency, Money};
pub use price::{Price, PriceList, Rate};
pub use report::{Bill, Unpriced, UsageLine, UsageQuery, UsageReport};
pub use skep_store::{UsageBy, UsageCounts};
