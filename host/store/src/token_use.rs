//! Tokens that models generated per day. Daily budgets are based on these counts, also after a restart.

use crate::{
    Store, StoreError, rows,
    sql::{Connection, KeyPart, Row, query},
};

const ADD: &str = "INSERT INTO token_use (day, tenant, agent, tokens) VALUES (?1, ?2, ?3, ?4)
    ON CONFLICT (day, tenant, agent) DO UPDATE SET tokens = token_use.tokens + ?4";

/// Number of tokens of one tenant on one day.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenUse {
    /// The day, in UTC days since 1970.
    pub day: u32,
    pub tenant: String,
    /// The agent; `None` if the tenant used a model directly.
    pub agent: Option<String>,
    pub tokens: u64,
}

impl Store {
    /// Returns the counts of a day.
    pub async fn token_use(&self, day: u32) -> Result<Vec<TokenUse>, StoreError> {
        let rows =
            query("SELECT tenant, agent, tokens, day FROM token_use WHERE day = ? ORDER BY tenant, agent")
                .bind(day)
                .fetch_all(&self.readers)
                .await
                .map_err(StoreError::while_it("read the tokens of a day"))?;
        Ok(rows::readable(&rows, "token count", token_use_row))
    }
}

fn token_use_row(row: &Row) -> Result<TokenUse, sqlx::Error> {
    Ok(TokenUse {
        day: row.try_get(3)?,
        tenant: row.try_get(0)?,
        agent: Some(row.try_get(1)?).filter(|agent: &String| !agent.is_empty()),
        tokens: row.try_get::<i64>(2)? as u64,
    })
}

/// Adds tokens to the counts of their days.
pub(crate) fn add(connection: &mut Connection, uses: &[&TokenUse]) {
    for TokenUse { day, tenant, agent, tokens } in uses {
        let key = vec![
            KeyPart::Number(i64::from(*day)),
            KeyPart::Text(tenant.clone()),
            KeyPart::Text(agent.clone().unwrap_or_default()),
        ];
        connection.count(ADD, key, &[i64::try_from(*tokens).unwrap_or(i64::MAX)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(day: u32, agent: Option<&str>, tokens: u64) -> TokenUse {
        TokenUse { day, tenant: "acme".into(), agent: agent.map(Into::into), tokens }
    }

    #[tokio::test]
    async fn tokens_of_a_day_add_up_and_old_days_are_removed() {
        let store = Store::for_tests().await.expect("a database in memory");
        for (day, agent, tokens) in [(7, Some("a"), 3), (7, Some("a"), 4), (7, None, 5), (8, Some("a"), 6)] {
            store.count_use(Some(used(day, agent, tokens)), Vec::new()).await.expect("written");
        }
        assert_eq!(store.token_use(7).await.expect("read"), [used(7, None, 5), used(7, Some("a"), 7)]);
        assert_eq!(store.forget_token_use(8).await.expect("removed"), 2);
        assert_eq!(store.token_use(7).await.expect("read"), []);
        assert_eq!(store.token_use(8).await.expect("read"), [used(8, Some("a"), 6)]);
    }
}
