//! Reports on the use of models.

use anyhow::{Context as _, Result};
use reqwest::{Method, RequestBuilder};
use skep_api::UsageReport;

use super::Client;

/// Selects usage. The host has defaults for what is missing.
#[derive(Debug, Clone, Default)]
pub struct UsageQuery {
    pub by: String,
    pub since: Option<String>,
    pub until: Option<String>,
    pub tenant: Option<String>,
}

impl Client {
    /// Returns a report on the use of models.
    pub async fn usage(&self, query: &UsageQuery) -> Result<UsageReport> {
        self.json(self.usage_request(query, "json")?).await
    }

    /// Returns the report as a table in CSV.
    pub async fn usage_csv(&self, query: &UsageQuery) -> Result<String> {
        let answer = self.answer(self.usage_request(query, "csv")?).await?;
        answer.text().await.context("the host's answer broke off")
    }

    fn usage_request(&self, query: &UsageQuery, format: &str) -> Result<RequestBuilder> {
        let UsageQuery { by, since, until, tenant } = query;
        let query = [
            ("by", Some(by.as_str())),
            ("since", since.as_deref()),
            ("until", until.as_deref()),
            ("tenant", tenant.as_deref()),
            ("format", Some(format)),
        ];
        let given: Vec<_> = query.into_iter().filter(|(_, value)| value.is_some()).collect();
        Ok(self.request(Method::GET, &["v1", "usage"])?.query(&given))
    }
}
