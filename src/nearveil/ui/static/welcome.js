// Store the secret of this tab, and open the page.

sessionStorage.setItem("nearveil-page", document.querySelector("meta[name=page-secret]").content);
location.replace("/");
