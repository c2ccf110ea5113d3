BEGIN TRANSACTION;
CREATE TABLE nearveil_account (
	name TEXT NOT NULL, 
	opening TEXT NOT NULL, 
	terms TEXT NOT NULL, 
	totals TEXT NOT NULL, 
	sequence BIGINT NOT NULL, 
	head TEXT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "nearveil_account" VALUES('pure','{"owner":"ann","protects":"query","relation":"replace","unit":"image"}','{"epsilon":2.0,"kind":"pure","limits":[2000000000000000000]}','[500000000000000000]',3,'7aae561e2ff33388b6f4486b2b901cc4ab5e687ef80da32d3aae5312f9842970');
CREATE TABLE nearveil_entry (
	account TEXT NOT NULL, 
	sequence BIGINT NOT NULL, 
	kind TEXT NOT NULL, 
	time TEXT NOT NULL, 
	"key" TEXT, 
	client TEXT, 
	nonce TEXT NOT NULL, 
	payload TEXT NOT NULL, 
	state TEXT NOT NULL, 
	client_state TEXT, 
	hash TEXT NOT NULL, 
	slot TEXT, 
	PRIMARY KEY (account, sequence), 
	FOREIGN KEY(account) REFERENCES nearveil_account (name), 
	UNIQUE (slot)
);
INSERT INTO "nearveil_entry" VALUES('pure',1,'opened','2026-11-16T19:09:21.847967+00:00',NULL,NULL,'f019883f4e9fc4c3ce8eabe22b51fafa','{"cost":null,"opening":"{\"owner\":\"ann\",\"protects\":\"query\",\"relation\":\"replace\",\"unit\":\"image\"}","terms":"{\"epsilon\":2.0,\"kind\":\"pure\",\"limits\":[2000000000000000000]}"}','f0e005730ad232a82291ca2c6e8a9208d3e783bc8f2aaa174a52e9214c44b230',NULL,'613a0ec1bee6fc3add7d0fd81d8f91013f5df445c0279d49fbcc6e336f8a3f5c',NULL);
INSERT INTO "nearveil_entry" VALUES('pure',2,'debit','2026-11-16T19:09:21.859000+00:00','first',NULL,'9669d82fdf07f4458826afbdc8751395','{"charge":[["{\"epsilon\":0.5,\"type\":\"PureDp\"}",1]],"price":[500000000000000000]}','74111ee64cc8f705f4d279ff012b2bdd88197e6f09dedeb7773e3e318e953896',NULL,'1604a9c22874e3538b6d99bd8ebde6fe8740e88a76bdf776a0a168a90df64822','a84e382c8957da1155467f82a39bcad1ff7850c80fd60b48c39e11f3b4192511');
INSERT INTO "nearveil_entry" VALUES('pure',3,'message','2026-11-16T19:09:21.864048+00:00','first',NULL,'9669d82fdf07f4458826afbdc8751395','{"message":"a2VwdA=="}','74111ee64cc8f705f4d279ff012b2bdd88197e6f09dedeb7773e3e318e953896',NULL,'7aae561e2ff33388b6f4486b2b901cc4ab5e687ef80da32d3aae5312f9842970','7b7312feb7b0f0edaf5b2fece0a405aa65755d25be0e5f1dff3a25a53b184dbe');
CREATE TABLE nearveil_ledger (
	identity TEXT NOT NULL, 
	PRIMARY KEY (identity)
);
INSERT INTO "nearveil_ledger" VALUES('c2493d68f358a719003a5ae0c9a0d009');
CREATE TABLE nearveil_ledger_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT nearveil_ledger_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "nearveil_ledger_version" VALUES('0002');
CREATE TABLE nearveil_quota (
	account TEXT NOT NULL, 
	client TEXT NOT NULL, 
	terms TEXT NOT NULL, 
	totals TEXT NOT NULL, 
	sequence BIGINT NOT NULL, 
	PRIMARY KEY (account, client), 
	FOREIGN KEY(account) REFERENCES nearveil_account (name)
);
COMMIT;
