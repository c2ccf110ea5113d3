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
INSERT INTO "nearveil_account" VALUES('pure','{"owner":"ann","protects":"query","relation":"replace","unit":"image"}','{"epsilon":2.0,"kind":"pure","limits":[2000000000000000000]}','[500000000000000000]',3,'ff7bbf488de12a2646b2eae2ee5d3cd78445f513fe7c19c55aa8933ece8562b7');
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
INSERT INTO "nearveil_entry" VALUES('pure',1,'opened','2026-11-17T06:33:57.411204+00:00',NULL,NULL,'f583dff384ac3f5a170726a1d8b1b808','{"cost":null,"opening":"{\"owner\":\"ann\",\"protects\":\"query\",\"relation\":\"replace\",\"unit\":\"image\"}","terms":"{\"epsilon\":2.0,\"kind\":\"pure\",\"limits\":[2000000000000000000]}"}','f0e005730ad232a82291ca2c6e8a9208d3e783bc8f2aaa174a52e9214c44b230',NULL,'663113f715813f5e34a18dcb08073afecdde9fbec3618ab606e9b39ad95aef4e',NULL);
INSERT INTO "nearveil_entry" VALUES('pure',2,'debit','2026-11-17T06:33:57.423719+00:00','first',NULL,'5849a29b850dfe3ea3e52123c96494f8','{"charge":[["{\"epsilon\":0.5,\"type\":\"PureDp\"}",1]],"price":[500000000000000000]}','74111ee64cc8f705f4d279ff012b2bdd88197e6f09dedeb7773e3e318e953896',NULL,'197f4497f16b7a849e6d85309938f6207b417737cea613b07e40cd91146767df','a84e382c8957da1155467f82a39bcad1ff7850c80fd60b48c39e11f3b4192511');
INSERT INTO "nearveil_entry" VALUES('pure',3,'message','2026-11-17T06:33:57.432948+00:00','first',NULL,'5849a29b850dfe3ea3e52123c96494f8','{"message":"a2VwdA=="}','74111ee64cc8f705f4d279ff012b2bdd88197e6f09dedeb7773e3e318e953896',NULL,'ff7bbf488de12a2646b2eae2ee5d3cd78445f513fe7c19c55aa8933ece8562b7','7b7312feb7b0f0edaf5b2fece0a405aa65755d25be0e5f1dff3a25a53b184dbe');
CREATE TABLE nearveil_ledger (
	identity TEXT NOT NULL, 
	PRIMARY KEY (identity)
);
INSERT INTO "nearveil_ledger" VALUES('db99f8ece6152ee3d4378e9b27e82b6a');
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
