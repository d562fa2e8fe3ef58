//! `#[tool]`: keeps the function, and adds a type with the same name that carries its schema and its call.
//!
//! Functions and types live in different namespaces, so `tools = [module::name]` reaches the type wherever
//! the function is reachable, and the function can still be called. All other generated names begin with `__`, because
//! the generated code uses names of the author and must not hide them.

use proc_macro2::{Span, TokenStream};
use quote::quote;
use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::{
    Attribute, Error, FnArg, Ident, ItemFn, Pat, PatType, Result, ReturnType, Signature, Type, parse2,
};

use crate::{documentation, example::Expected, tool_options::ToolOptions};

/// Attributes of a parameter that belong to the schema of the arguments and not to the function.
const FIELD_ATTRIBUTES: [&str; 4] = ["doc", "schemars", "serde", "allow"];

/// Expands `#[tool]`. An error points to the token at fault.
pub fn expand(attributes: TokenStream, item: TokenStream) -> Result<TokenStream> {
    let options: ToolOptions = parse2(attributes)?;
    let mut function: ItemFn = parse2(item)
        .map_err(|error| Error::new(error.span(), format!("`#[tool]` must be on a function: {error}")))?;
    check_signature(&function.sig)?;
    let name = function.sig.ident.clone();
    let name_text = name.unraw().to_string();
    if name_text.len() > 64 || !name_text.is_ascii() {
        return Err(Error::new(
            name.span(),
            "a tool's name can have at most 64 characters of a-z, A-Z, 0-9 and _",
        ));
    }
    let description = documentation::text(&function.attrs);
    if description.is_empty() {
        return Err(Error::new(
            name.span(),
            "a tool needs a doc comment, which tells the model what the tool does and when to use it",
        ));
    }

    let takes_context = takes_context(&function.sig)?;
    let arguments = arguments(&mut function.sig, takes_context)?;
    options.check_examples(expected(&arguments).as_deref())?;
    let fields =
        arguments.iter().map(|Argument { name, ty, attributes }| quote! { #(#attributes)* #name: #ty });
    let names = arguments.iter().map(|argument| &argument.name);
    let context = takes_context.then(|| quote! { __cx, });
    let wait = function.sig.asyncness.map(|_| quote! { .await });
    let call = quote! { #name(#context #(__arguments.#names),*) #wait };
    let (return_type, result) = match returned(&function.sig.output) {
        Returned::Result(ty) => (ty, call),
        Returned::Plain(ty) => (
            quote! { ::core::result::Result<#ty, ::skep_sdk::ToolError> },
            quote! { ::core::result::Result::Ok(#call) },
        ),
    };
    let visibility = &function.vis;
    let options = options.fields();

    Ok(quote! {
        #function

        #[doc(hidden)]
        #[allow(non_camel_case_types, dead_code)]
        #visibility enum #name {}

        const _: () = {
            #[derive(::skep_sdk::__private::serde::Deserialize, ::skep_sdk::__private::schemars::JsonSchema)]
            #[serde(crate = "::skep_sdk::__private::serde", deny_unknown_fields, expecting = "struct Arguments")]
            #[schemars(crate = "::skep_sdk::__private::schemars")]
            struct __Arguments { #(#fields),* }

            type __Returned = #return_type;

            fn __call(
                __cx: &::skep_sdk::Context,
                __arguments: ::skep_sdk::__private::serde_json::Value,
            ) -> ::skep_sdk::__private::Task<
                '_,
                ::core::result::Result<::skep_sdk::__private::serde_json::Value, ::skep_sdk::ToolError>,
            > {
                ::std::boxed::Box::pin(async move {
                    let __arguments: __Arguments = ::skep_sdk::__private::arguments(#name_text, __arguments)?;
                    let __returned: __Returned = #result;
                    ::skep_sdk::__private::ToolReturn::into_json(__returned)
                })
            }

            impl ::skep_sdk::__private::ToolFunction for #name {
                const TOOL: ::skep_sdk::__private::Tool = ::skep_sdk::__private::Tool {
                    name: #name_text,
                    description: #description,
                    input_schema: ::skep_sdk::__private::input_schema::<__Arguments>,
                    output_schema: <__Returned as ::skep_sdk::__private::ToolReturn>::schema,
                    #options
                    call: __call,
                };
            }
        };
    })
}

struct Argument {
    name: Ident,
    ty: Type,
    attributes: Vec<Attribute>,
}

enum Returned {
    Result(TokenStream),
    Plain(TokenStream),
}

fn check_signature(signature: &Signature) -> Result<()> {
    if let Some(generic) = signature.generics.params.first() {
        return Err(Error::new_spanned(
            generic,
            "a tool cannot be generic, because the model reads one fixed schema of its arguments",
        ));
    }
    if let Some(clause) = &signature.generics.where_clause {
        return Err(Error::new_spanned(clause, "a tool cannot be generic"));
    }
    if let Some(receiver) = signature.receiver() {
        return Err(Error::new_spanned(
            receiver,
            "a tool must be a free function: take `cx: &Context` and keep its data in `cx.state()`",
        ));
    }
    if let Some(token) = signature.unsafety {
        return Err(Error::new(
            token.span,
            "a tool cannot be unsafe, because the model can call it with any arguments",
        ));
    }
    if let Some(abi) = &signature.abi {
        return Err(Error::new_spanned(abi, "a tool must be an ordinary Rust function"));
    }
    if let Some(variadic) = &signature.variadic {
        return Err(Error::new_spanned(variadic, "a tool must name each of its arguments"));
    }
    Ok(())
}

/// Returns whether the first parameter is the context. A context in another position, or a mutable one, is an
/// error.
fn takes_context(signature: &Signature) -> Result<bool> {
    let mut first = false;
    for (index, parameter) in signature.inputs.iter().enumerate() {
        let FnArg::Typed(PatType { ty, .. }) = parameter else { continue };
        let (ty, mutable) = match &**ty {
            Type::Reference(reference) => (&*reference.elem, Some(reference.mutability)),
            ty => (ty, None),
        };
        if !last_segment_is(ty, "Context") {
            continue;
        }
        match mutable {
            Some(None) if index == 0 => first = true,
            Some(None) => {
                return Err(Error::new_spanned(parameter, "`&Context` must be a tool's first parameter"));
            }
            Some(Some(_)) | None => {
                return Err(Error::new_spanned(
                    parameter,
                    "a tool takes `&Context`, because several tools of one round run concurrently",
                ));
            }
        }
    }
    Ok(first)
}

/// Returns the parameters that are arguments. Their field attributes are moved out of the function.
fn arguments(signature: &mut Signature, takes_context: bool) -> Result<Vec<Argument>> {
    let mut arguments = Vec::new();
    for parameter in signature.inputs.iter_mut().skip(usize::from(takes_context)) {
        let FnArg::Typed(parameter) = parameter else { continue };
        let name = match &*parameter.pat {
            Pat::Ident(pattern) if pattern.by_ref.is_none() && pattern.subpat.is_none() => {
                pattern.ident.clone()
            }
            pattern => {
                return Err(Error::new_spanned(
                    pattern,
                    "give this argument a plain name, because the model cannot use a pattern",
                ));
            }
        };
        if let Some((ty, why)) = unusable(&parameter.ty) {
            return Err(Error::new(ty, why));
        }
        let (attributes, rest) = std::mem::take(&mut parameter.attrs)
            .into_iter()
            .partition(|attribute| FIELD_ATTRIBUTES.iter().any(|known| attribute.path().is_ident(known)));
        parameter.attrs = rest;
        arguments.push(Argument { name, ty: (*parameter.ty).clone(), attributes });
    }
    Ok(arguments)
}

/// Returns the arguments that an example of the tool has to name, or `None` if an attribute of `serde` may
/// rename one.
fn expected(arguments: &[Argument]) -> Option<Vec<Expected>> {
    let expected = |argument: &Argument| {
        let is_renamed = argument.attributes.iter().any(|attribute| attribute.path().is_ident("serde"));
        let is_required = !last_segment_is(&argument.ty, "Option");
        (!is_renamed).then(|| Expected { name: argument.name.unraw().to_string(), is_required })
    };
    arguments.iter().map(expected).collect()
}

/// Returns why a type cannot be created from the model's JSON, if the type alone shows it.
fn unusable(ty: &Type) -> Option<(Span, &'static str)> {
    match ty {
        Type::Reference(reference) if last_segment_is(&reference.elem, "str") => {
            Some((ty.span(), "an argument must be owned: use `String`"))
        }
        Type::Reference(_) => Some((ty.span(), "an argument must be owned: use the type without `&`")),
        Type::ImplTrait(_) => {
            Some((ty.span(), "an argument must have one type, because the model reads its schema"))
        }
        _ => None,
    }
}

fn returned(output: &ReturnType) -> Returned {
    match output {
        ReturnType::Default => Returned::Plain(quote! { () }),
        ReturnType::Type(_, ty) if last_segment_is(ty, "Result") => Returned::Result(quote! { #ty }),
        ReturnType::Type(_, ty) => Returned::Plain(quote! { #ty }),
    }
}

fn last_segment_is(ty: &Type, name: &str) -> bool {
    match ty {
        Type::Path(path) => path.path.segments.last().is_some_and(|segment| segment.ident == name),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(item: TokenStream) -> String {
        expand(TokenStream::new(), item).unwrap_err().to_string()
    }

    #[test]
    fn a_good_tool_expands_to_rust() {
        let expanded = expand(
            TokenStream::new(),
            quote! {
                /// Finds an order.
                pub async fn find_order(cx: &Context, #[schemars(range(min = 1))] id: u32, note: Option<String>)
                    -> Result<Order, ToolError> { body() }
            },
        )
        .unwrap();
        let file: syn::File = parse2(expanded).unwrap();
        let syn::Item::Fn(function) = &file.items[0] else { panic!("the function comes first") };
        assert!(function.sig.inputs.iter().all(|parameter| match parameter {
            FnArg::Typed(parameter) => parameter.attrs.is_empty(),
            FnArg::Receiver(_) => false,
        }));
        assert_eq!(file.items.len(), 3);
    }

    #[test]
    fn each_misuse_has_a_specific_error() {
        for (item, expected) in [
            (quote! { fn f() {} }, "doc comment"),
            (quote! { #[doc = "x"] fn f<T>(a: T) {} }, "generic"),
            (quote! { #[doc = "x"] fn f(&self) {} }, "free function"),
            (quote! { #[doc = "x"] fn f((a, b): (u8, u8)) {} }, "plain name"),
            (quote! { #[doc = "x"] fn f(_: u8) {} }, "plain name"),
            (quote! { #[doc = "x"] fn f(a: &str) {} }, "`String`"),
            (quote! { #[doc = "x"] fn f(a: &[u8]) {} }, "without `&`"),
            (quote! { #[doc = "x"] fn f(a: impl Into<String>) {} }, "one type"),
            (quote! { #[doc = "x"] fn f(cx: &mut Context) {} }, "takes `&Context`"),
            (quote! { #[doc = "x"] fn f(a: u8, cx: &Context) {} }, "first parameter"),
            (quote! { #[doc = "x"] unsafe fn f() {} }, "unsafe"),
            (quote! { struct F; }, "must be on a function"),
        ] {
            let message = error(item.clone());
            assert!(message.contains(expected), "{item}: {message}");
        }
    }
}
