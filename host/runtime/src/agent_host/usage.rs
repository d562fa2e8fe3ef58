//! Reports on the use of models.

use super::AgentHost;
use crate::{RuntimeError, UsageDay, UsageQuery, UsageReport};
use skep_store::UsageFilter;

/// Maximum number of sums by group, day and model in one report.
const MAX_ROWS: u32 = 100_000;

impl AgentHost {
    /// Returns what the use of models cost.
    pub async fn usage(&self, query: &UsageQuery) -> Result<UsageReport, RuntimeError> {
        let UsageQuery { tenant, by, since, until } = query;
        let filter =
            UsageFilter { tenant: tenant.clone(), first_day: since.number(), last_day: until.number() };
        let sums = self.host().store.usage(&filter, *by, MAX_ROWS + 1).await?;
        if sums.len() > MAX_ROWS as usize {
            return Err(RuntimeError::UsageTooLong { limit: MAX_ROWS });
        }
        Ok(UsageReport::new(*by, sums, &self.inner.rules.now().prices))
    }

    /// Returns the day in UTC, as the host's clock has it.
    pub fn today(&self) -> UsageDay {
        UsageDay::of_ms(self.host().clock.now_ms())
    }
}
