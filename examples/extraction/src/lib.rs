//! Reads invoices, as text or as an e-mail, into a Rust type. The schema of the type is enforced while the model
//! writes, so the result always has all fields, a date that looks like one, and a currency that is known.
//!
//! Whether the values are right is up to the model; `measure.py` counts that.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// Longest document, in bytes. A longer one is refused before the model reads it.
const MAX_DOCUMENT_BYTES: usize = 8 << 10;

/// The contents of an invoice. The fields are in the order in which the model writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Invoice {
    /// Name of the company or person that sent the invoice.
    #[schemars(length(min = 2, max = 40))]
    vendor: String,
    /// Number of the invoice, as it is written.
    #[schemars(regex(pattern = r"^[A-Z0-9][A-Z0-9/-]{1,15}$"))]
    number: String,
    /// Date of the invoice.
    #[schemars(regex(pattern = r"^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])$"))]
    date: String,
    currency: Currency,
    /// Total amount to pay.
    #[schemars(range(min = 0, max = 1_000_000))]
    total: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
enum Currency {
    Eur,
    Gbp,
    Usd,
}

/// Returns an example for the model. None of the examples is among the documents that are measured.
fn example(vendor: &str, number: &str, date: &str, currency: Currency, total: f64) -> Invoice {
    Invoice { vendor: vendor.into(), number: number.into(), date: date.into(), currency, total }
}

/// Reads an invoice and returns its fields as JSON.
#[agent]
async fn extraction(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let document = message.text.trim();
    if document.is_empty() || document.len() > MAX_DOCUMENT_BYTES {
        let why = format!("send the text of one invoice, with at most {MAX_DOCUMENT_BYTES} bytes");
        return Err(AgentError::InvalidMessage(why));
    }
    let invoice: Invoice = cx
        .conversation()
        .clear()
        .system("You read invoices. Reply with the vendor, the number, the date, the currency and the total, as JSON.")
        .example(
            "Nordic Tools AS\nInvoice 4402\nDate: 2026-01-15\n\n2 hammers    30.00\n1 saw    22.50\n\nTotal: 52.50 EUR",
            &example("Nordic Tools AS", "4402", "2026-01-15", Currency::Eur, 52.5),
        )
        .example(
            "From: sales@inkwell.example\nSubject: Invoice IW-77\n\nDear Ada,\n\nour invoice IW-77 of 2025-11-03:\n\
             Paper: 12.00 USD\nInk: 30.00 USD\nThe total is 42.00 USD.\n\nInkwell Press",
            &example("Inkwell Press", "IW-77", "2025-11-03", Currency::Usd, 42.0),
        )
        .example(
            "INVOICE\n\nOld Mill Cafe        No. OM/2026/8\n2026-02-28\n\nLunch for 9        135.00\nCoffee        27.00\n\
             ----\nTotal GBP        162.00",
            &example("Old Mill Cafe", "OM/2026/8", "2026-02-28", Currency::Gbp, 162.0),
        )
        .user(document)
        .temperature(0.0)
        .max_tokens(120)
        .hidden()
        .extract()
        .await?;
    let currency = format!("{:?}", invoice.currency).to_uppercase();
    Reply::json(format!("{}: {:.2} {currency}", invoice.vendor, invoice.total), &invoice)
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_sdk::serde_json::json;
    use skep_sdk::testing::{Harness, ScriptedModel};

    #[test]
    fn the_fields_of_an_invoice_are_returned_as_json() {
        let read = json!({"vendor": "City Cabs", "number": "880415", "date": "2026-07-08", "currency": "EUR", "total": 43.0});
        let mut harness = Harness::new(extraction).model(ScriptedModel::new().json(&read));
        let reply = harness.send(include_str!("../documents/taxi.txt")).unwrap().reply;
        assert_eq!((reply.text.as_str(), reply.data), ("City Cabs: 43.00 EUR", Some(read)));
    }

    #[test]
    fn documents_do_not_see_each_other() {
        let read =
            json!({"vendor": "A B", "number": "77", "date": "2026-07-08", "currency": "EUR", "total": 1.0});
        let model = ScriptedModel::new().json(&read).json(&read);
        let mut harness = Harness::new(extraction).model(model);
        let alone = harness.send("Invoice 77").map(|_| harness.prompts()[0].len()).unwrap();
        harness.send("Invoice 78").unwrap();
        assert_eq!(harness.prompts()[1].len(), alone);
    }

    #[test]
    fn empty_and_oversized_documents_are_refused_without_the_model() {
        for document in [" \n".to_owned(), "x".repeat(MAX_DOCUMENT_BYTES + 1)] {
            let error = Harness::new(extraction).send(document).unwrap_err();
            assert!(matches!(error, AgentError::InvalidMessage(_)), "{error}");
        }
    }
}
