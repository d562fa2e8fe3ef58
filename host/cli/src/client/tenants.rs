//! Tenants.

use anyhow::Result;
use reqwest::Method;
use skep_api::{DeletedTenant, Tenant, TenantList};

use super::Client;

impl Client {
    /// Returns the tenants by name.
    pub async fn tenants(&self) -> Result<Vec<Tenant>> {
        let list: TenantList = self.json(self.request(Method::GET, &["v1", "tenants"])?).await?;
        Ok(list.data)
    }

    /// Deletes a tenant with everything that belongs to it, and with its usage if asked to.
    pub async fn delete_tenant(&self, name: &str, forget_usage: bool) -> Result<DeletedTenant> {
        let request = self.request(Method::DELETE, &["v1", "tenants", name])?;
        self.json(request.query(&[("forget_usage", forget_usage)])).await
    }
}
