//! `#[agent]`: the exports of a component, and in native builds a function that returns the agent for a
//! harness.

use proc_macro2::TokenStream;
use quote::quote;
use syn::ext::IdentExt;
use syn::parse::{Parse, ParseStream, Parser};
use syn::punctuated::Punctuated;
use syn::{Attribute, Error, FnArg, Ident, ItemFn, Path, Result, ReturnType, Signature, Token, Visibility};
use syn::{bracketed, parse_quote, parse2};

use crate::documentation;

pub fn expand(attributes: TokenStream, item: TokenStream) -> Result<TokenStream> {
    let Options { tools, on_alarm, on_event } = Options::parse.parse2(attributes)?;
    let mut function: ItemFn = parse2(item)
        .map_err(|error| Error::new(error.span(), format!("`#[agent]` must be on a function: {error}")))?;
    check_signature(&function.sig)?;
    let name = function.sig.ident.clone();
    let name_text = name.unraw().to_string();
    let description = documentation::text(&function.attrs);
    if description.is_empty() {
        return Err(Error::new(
            name.span(),
            "an agent needs a doc comment, which becomes the description that people see",
        ));
    }

    let (documentation, rest): (Vec<Attribute>, Vec<Attribute>) = std::mem::take(&mut function.attrs)
        .into_iter()
        .partition(|attribute| attribute.path().is_ident("doc"));
    function.attrs = rest;
    let visibility = match std::mem::replace(&mut function.vis, Visibility::Inherited) {
        Visibility::Inherited => parse_quote! { pub },
        given => given,
    };
    let call = match function.sig.asyncness {
        Some(_) => quote! { #name(cx, message) },
        None => quote! { async move { #name(cx, message) } },
    };

    let on_alarm = on_alarm.map(|function| {
        quote! { .on_alarm(|cx, alarm| ::std::boxed::Box::pin(#function(cx, alarm))) }
    });
    let on_event = on_event.map(|function| {
        quote! { .on_event(|cx, event| ::std::boxed::Box::pin(#function(cx, event))) }
    });

    Ok(quote! {
        #(#documentation)*
        #[allow(dead_code)]
        #visibility fn #name() -> ::skep_sdk::Agent {
            #function

            fn turn(
                cx: &mut ::skep_sdk::Context,
                message: ::skep_sdk::Message,
            ) -> ::skep_sdk::__private::Task<
                '_,
                ::core::result::Result<::skep_sdk::Reply, ::skep_sdk::AgentError>,
            > {
                ::std::boxed::Box::pin(#call)
            }

            const TOOLS: &[::skep_sdk::__private::Tool] =
                &[#(<#tools as ::skep_sdk::__private::ToolFunction>::TOOL),*];

            ::skep_sdk::Agent::new(#name_text, #description, TOOLS, turn) #on_alarm #on_event
        }

        #[cfg(target_arch = "wasm32")]
        const _: () = {
            struct Component;

            impl ::skep_sdk::__private::AgentSource for Component {
                fn agent() -> ::skep_sdk::Agent {
                    #name()
                }
            }

            ::skep_sdk::__private::export!(Component with_types_in ::skep_sdk::__private::bindings);
        };
    })
}

#[derive(Default)]
struct Options {
    tools: Vec<Path>,
    on_alarm: Option<Path>,
    on_event: Option<Path>,
}

impl Parse for Options {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let mut tools: Option<Vec<Path>> = None;
        let (mut on_alarm, mut on_event) = (None, None);
        while !input.is_empty() {
            let option: Ident = input.parse()?;
            let unexpected = || {
                let message = format!(
                    "unexpected `{option}`; `#[agent]` accepts `tools = [a, b]`, `on_alarm = f` and `on_event = f`, \
                     each once"
                );
                Error::new(option.span(), message)
            };
            input.parse::<Token![=]>().map_err(|_| unexpected())?;
            match option.to_string().as_str() {
                "tools" if tools.is_none() => {
                    let list;
                    bracketed!(list in input);
                    let list = Punctuated::<Path, Token![,]>::parse_terminated(&list)?;
                    tools = Some(list.into_iter().collect());
                }
                "on_alarm" if on_alarm.is_none() => on_alarm = Some(input.parse()?),
                "on_event" if on_event.is_none() => on_event = Some(input.parse()?),
                _ => return Err(unexpected()),
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        let tools = tools.unwrap_or_default();
        for (index, tool) in tools.iter().enumerate() {
            let name = tool.segments.last().map(|segment| &segment.ident);
            if tools[..index].iter().any(|other| other.segments.last().map(|segment| &segment.ident) == name)
            {
                return Err(Error::new_spanned(
                    tool,
                    "there are two tools with this name; the model could not distinguish them",
                ));
            }
        }
        Ok(Self { tools, on_alarm, on_event })
    }
}

fn check_signature(signature: &Signature) -> Result<()> {
    let expected =
        "an agent must be `async fn name(cx: &mut Context, message: Message) -> Result<Reply, AgentError>`";
    if let Some(generic) = signature.generics.params.first() {
        return Err(Error::new_spanned(generic, format!("{expected}, but this function has generics")));
    }
    if let Some(receiver) = signature.receiver() {
        return Err(Error::new_spanned(receiver, format!("{expected}, but this is a method")));
    }
    if signature.inputs.len() != 2 {
        return Err(Error::new_spanned(&signature.ident, format!("{expected}, with two parameters")));
    }
    if let Some(FnArg::Typed(first)) = signature.inputs.first()
        && !matches!(&*first.ty, syn::Type::Reference(_))
    {
        return Err(Error::new_spanned(
            &first.ty,
            format!("{expected}, and the first parameter must be `&mut Context`"),
        ));
    }
    if let ReturnType::Default = signature.output {
        return Err(Error::new_spanned(
            &signature.ident,
            format!("{expected}, but this function returns nothing"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_good_agent_expands_to_rust() {
        let expanded = expand(
            quote! { tools = [find_order, orders::cancel,] },
            quote! {
                /// Knows orders.
                async fn concierge(cx: &mut Context, message: Message) -> Result<Reply, AgentError> { body() }
            },
        )
        .unwrap();
        let file: syn::File = parse2(expanded).unwrap();
        let syn::Item::Fn(handle) = &file.items[0] else {
            panic!("the function that returns the agent comes first")
        };
        assert_eq!(handle.sig.ident, "concierge");
        assert!(handle.sig.inputs.is_empty() && matches!(handle.vis, Visibility::Public(_)));
    }

    #[test]
    fn each_misuse_has_a_specific_error() {
        let good =
            quote! { #[doc = "x"] async fn f(cx: &mut Context, m: Message) -> Result<Reply, AgentError> {} };
        for (options, item, expected) in [
            (quote! { tool = [a] }, good.clone(), "unexpected `tool`"),
            (quote! { tools = [a, b::a] }, good, "two tools"),
            (quote! {}, quote! { async fn f(cx: &mut Context, m: Message) -> R {} }, "doc comment"),
            (quote! {}, quote! { #[doc = "x"] async fn f(cx: &mut Context) -> R {} }, "two parameters"),
            (
                quote! {},
                quote! { #[doc = "x"] async fn f(cx: Context, m: Message) -> R {} },
                "first parameter",
            ),
            (
                quote! {},
                quote! { #[doc = "x"] async fn f(cx: &mut Context, m: Message) {} },
                "returns nothing",
            ),
            (quote! {}, quote! { const X: u8 = 1; }, "must be on a function"),
        ] {
            let message = expand(options, item.clone()).unwrap_err().to_string();
            assert!(message.contains(expected), "{item}: {message}");
        }
    }
}
