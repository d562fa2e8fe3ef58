//! Makes the HTTP request in the message: `METHOD URL`, optionally followed by the name of a secret, which is
//! sent as a bearer token. The reply is the status and the body, or the error.

use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// Makes requests.
#[agent]
async fn web(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let mut words = message.text.split(' ');
    let (method, url) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let mut request = cx.http().request(method, url);
    if let Some(name) = words.next() {
        request = request.bearer(cx.secret(name)?);
    }
    Ok(match request.send().await {
        Ok(response) => Reply::text(format!("{} {}", response.status, response.text()?)),
        Err(error) => Reply::text(error.to_string()),
    })
}
